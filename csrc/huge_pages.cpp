#include "huge_pages.h"

#include <sys/mman.h>

#include <cerrno>

#include "align.h"

namespace offload {
namespace {

constexpr int64_t kHugePage = 2 << 20;  // of x86-64, and of arm64 with pages of 4 KiB

void* map_plain(size_t nbytes) noexcept {
  return ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

}  // namespace

void* map_memory(size_t nbytes) noexcept {
  nbytes = static_cast<size_t>(round_up(static_cast<int64_t>(nbytes), page_size()));
  if (nbytes < kHugePage) return map_plain(nbytes);
  void* whole = map_plain(nbytes + kHugePage);
  if (whole == MAP_FAILED) return map_plain(nbytes);
  auto* start = static_cast<char*>(whole);
  const int64_t before =
      round_up(reinterpret_cast<intptr_t>(start), kHugePage) - reinterpret_cast<intptr_t>(start);
  char* const aligned = start + before;
  if (before > 0) ::munmap(start, static_cast<size_t>(before));
  if (before < kHugePage) ::munmap(aligned + nbytes, static_cast<size_t>(kHugePage - before));
  ::madvise(aligned, nbytes, MADV_HUGEPAGE);  // a kernel without them gives plain pages
  return aligned;
}

}  // namespace offload
