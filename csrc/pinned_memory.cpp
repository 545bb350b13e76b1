#include "pinned_memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <stdexcept>
#include <string>

#include "align.h"
#include "error.h"
#include "huge_pages.h"

namespace offload {
namespace {

size_t mapped(int64_t nbytes) { return static_cast<size_t>(round_up(nbytes, page_size())); }

}  // namespace

PinnedMemory& PinnedMemory::instance() {
  // Never destroyed: tensors may outlive every static object at interpreter exit.
  static PinnedMemory* const manager = [] {
    static std::aligned_storage_t<sizeof(PinnedMemory), alignof(PinnedMemory)> place;
    return ::new (&place) PinnedMemory;
  }();
  return *manager;
}

PinnedMemory::PinnedMemory() { ::pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child); }

void PinnedMemory::before_fork() noexcept { instance().mutex_.lock(); }

void PinnedMemory::after_fork_in_parent() noexcept { instance().mutex_.unlock(); }

// Memory locks stay with the parent.
void PinnedMemory::after_fork_in_child() noexcept {
  for (auto& entry : instance().allocations_) entry.second.locked = false;
  instance().totals_.locked_bytes = 0;
  instance().mutex_.unlock();
}

char* PinnedMemory::allocate(int64_t nbytes, Locking locking) {
  if (nbytes <= 0) throw std::invalid_argument("nbytes must be at least 1, not " + std::to_string(nbytes));
  const size_t length = mapped(nbytes);
  void* address = map_memory(length);
  if (address == MAP_FAILED) throw IoError(IoFailure{errno, "mmap", "", 0, nbytes, 0});
  bool locked = false;
  if (locking != Locking::kNone) {
    locked = ::mlock(address, length) == 0;
    const int code = errno;
    if (!locked) ::munlock(address, length);  // mlock may have locked a part
    if (!locked && locking == Locking::kRequired) {
      ::munmap(address, length);
      throw IoError(IoFailure{code, "mlock", "", 0, nbytes, 0});
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  allocations_[static_cast<char*>(address)] = {nbytes, locked, 0};
  ++totals_.allocations;
  totals_.allocated_bytes += static_cast<int64_t>(length);
  if (locked) totals_.locked_bytes += static_cast<int64_t>(length);
  return static_cast<char*>(address);
}

void PinnedMemory::free(const void* address, std::optional<int64_t> nbytes) {
  auto* start = const_cast<char*>(static_cast<const char*>(address));
  int64_t whole = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = allocations_.find(start);
    if (known == allocations_.end() || nbytes.value_or(known->second.nbytes) != known->second.nbytes) {
      throw std::invalid_argument(find(address, nbytes.value_or(1)) != nullptr
                                      ? "a view cannot be freed: free the tensor that was allocated"
                                      : "not a locked tensor of this process, or freed already");
    }
    if (known->second.leases != 0) {
      throw std::invalid_argument("a transfer of this memory is in flight: wait for it before freeing");
    }
    whole = known->second.nbytes;
    forget(start);
  }
  ::munlock(start, mapped(whole));
  ::madvise(start, mapped(whole), MADV_DONTNEED);
}

void PinnedMemory::unmap(char* address, int64_t nbytes) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    forget(address);
  }
  ::munmap(address, mapped(nbytes));
}

bool PinnedMemory::lease(const void* address, int64_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Allocation* allocation = find(address, nbytes);
  if (allocation != nullptr) ++allocation->leases;
  return allocation != nullptr;
}

void PinnedMemory::end_lease(const void* address) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (Allocation* allocation = find(address, 1)) --allocation->leases;
}

bool PinnedMemory::is_locked(const void* address, int64_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Allocation* allocation = find(address, nbytes);
  return allocation != nullptr && allocation->locked;
}

bool PinnedMemory::is_managed(const void* address, int64_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return find(address, nbytes) != nullptr;
}

PinnedTotals PinnedMemory::totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return totals_;
}

PinnedMemory::Allocation* PinnedMemory::find(const void* address, int64_t nbytes) {
  const auto* start = static_cast<const char*>(address);
  auto after = allocations_.upper_bound(start);
  if (after == allocations_.begin()) return nullptr;
  auto& [base, allocation] = *std::prev(after);
  return start - base <= allocation.nbytes - nbytes ? &allocation : nullptr;
}

void PinnedMemory::forget(const char* address) noexcept {
  const auto known = allocations_.find(address);
  if (known == allocations_.end()) return;
  const auto length = static_cast<int64_t>(mapped(known->second.nbytes));
  --totals_.allocations;
  totals_.allocated_bytes -= length;
  if (known->second.locked) totals_.locked_bytes -= length;
  allocations_.erase(known);
}

}  // namespace offload
