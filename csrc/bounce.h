// Aligned buffers for user memory that O_DIRECT refuses; few, and made when first needed.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "error.h"
#include "huge_pages.h"

namespace offload {

class BouncePool {
 public:
  BouncePool(int64_t nbytes, size_t most)
      : nbytes_(nbytes), slab_nbytes_(std::max(nbytes, kLeastSlab)), most_(most) {}

  int64_t nbytes() const noexcept { return nbytes_; }  // of each

  // Null when all are lent: the block then waits for one to come back.
  char* lend() {
    if (free_.empty() && count_ < most_) {
      slabs_.push_back(Mapping(slab_nbytes_));
      for (int64_t at = 0; at + nbytes_ <= slab_nbytes_; at += nbytes_) add(slabs_.back().address() + at);
    }
    if (free_.empty()) return nullptr;
    char* buffer = free_.back();
    free_.pop_back();
    return buffer;
  }
  void give_back(char* buffer) { free_.push_back(buffer); }

 private:
  class Mapping {
   public:
    explicit Mapping(int64_t nbytes) : nbytes_(static_cast<size_t>(nbytes)) {
      void* address = map_memory(nbytes_);
      if (address == MAP_FAILED) throw IoError(errno, "mmap of a bounce buffer");
      address_ = static_cast<char*>(address);
    }
    Mapping(Mapping&& other) noexcept
        : address_(std::exchange(other.address_, nullptr)), nbytes_(other.nbytes_) {}
    Mapping& operator=(Mapping&&) = delete;
    ~Mapping() {
      if (address_ != nullptr) ::munmap(address_, nbytes_);
    }
    char* address() const noexcept { return address_; }

   private:
    char* address_ = nullptr;
    size_t nbytes_;
  };

  static constexpr int64_t kLeastSlab = 2 << 20;  // smaller ones get no huge pages

  void add(char* buffer) {
    free_.push_back(buffer);
    ++count_;
  }

  int64_t nbytes_;
  int64_t slab_nbytes_;
  size_t most_;  // and what the last slab has beyond it
  size_t count_ = 0;
  std::vector<Mapping> slabs_;
  std::vector<char*> free_;
};

}  // namespace offload
