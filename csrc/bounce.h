// Aligned buffers for user memory that O_DIRECT refuses; few, and made when first needed.
#pragma once

#include <sys/mman.h>

#include <memory>
#include <vector>

#include "error.h"

namespace offload {

class BouncePool {
 public:
  BouncePool(int64_t nbytes, size_t most) : nbytes_(nbytes), most_(most) {}

  int64_t nbytes() const noexcept { return nbytes_; }  // of each

  // Null when all are lent: the block then waits for one to come back.
  char* lend() {
    if (free_.empty() && all_.size() < most_) {
      all_.push_back(Mapping(nbytes_));
      free_.push_back(all_.back().address());
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
      void* address = ::mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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

  int64_t nbytes_;
  size_t most_;
  std::vector<Mapping> all_;
  std::vector<char*> free_;
};

}  // namespace offload
