// Aligned memory for blocks whose user memory O_DIRECT refuses.
#pragma once

#include <sys/mman.h>

#include <cstdint>

#include "error.h"
#include "huge_pages.h"

namespace offload {

// 4 MiB, mapped when first needed and lent lowest address first: what is copied stays in the cores' caches,
// which made reads of large tensors 1.5 times and writes 1.3 times as fast as 16 MiB did.
class BouncePool {
 public:
  static constexpr int64_t kMostNbytes = 1 << 20;  // of one loan

  BouncePool() = default;
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;
  ~BouncePool() {
    if (memory_ != nullptr) ::munmap(memory_, kNbytes);
  }

  // Null when there is no room: the block then waits for others to give theirs back.
  char* lend(int64_t nbytes) {
    if (memory_ == nullptr) map();
    const uint64_t wanted = mask(nbytes);
    for (int at = 0; at + granules(nbytes) <= kGranules; ++at) {
      if ((lent_ & (wanted << at)) != 0) continue;
      lent_ |= wanted << at;
      return memory_ + at * kGranule;
    }
    return nullptr;
  }
  void give_back(const char* address, int64_t nbytes) {
    lent_ &= ~(mask(nbytes) << ((address - memory_) / kGranule));
  }

 private:
  static constexpr int64_t kGranule = 64 << 10;
  static constexpr int kGranules = 64;  // a bit of `lent_` each
  static constexpr int64_t kNbytes = kGranule * kGranules;

  static int granules(int64_t nbytes) { return static_cast<int>((nbytes + kGranule - 1) / kGranule); }
  static uint64_t mask(int64_t nbytes) { return (uint64_t{1} << granules(nbytes)) - 1; }

  void map() {
    void* address = map_memory(kNbytes);
    if (address == MAP_FAILED) throw IoError(errno, "mmap of bounce buffers");
    memory_ = static_cast<char*>(address);
  }

  char* memory_ = nullptr;
  uint64_t lent_ = 0;
};

}  // namespace offload
