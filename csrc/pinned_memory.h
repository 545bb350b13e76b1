// Page-locked host memory of the whole process: every allocation, its extent, and what is locked in total.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace offload {

enum class Locking { kNone, kPreferred, kRequired };

struct PinnedTotals {
  int64_t allocations = 0;
  int64_t allocated_bytes = 0;
  int64_t locked_bytes = 0;
};

class PinnedMemory {
 public:
  static PinnedMemory& instance();

  // Page-aligned, zeroed. Throws IoError of mlock when locking is required and refused.
  char* allocate(int64_t nbytes, Locking locking);
  // Gives the memory back to the system but keeps the addresses mapped, so that a forgotten view reads zeros
  // instead of ending the process. Throws std::invalid_argument unless exactly this allocation exists.
  void free(const void* address, std::optional<int64_t> nbytes);
  // Ends the mapping, freed or not.
  void unmap(char* address, int64_t nbytes) noexcept;

  // While a transfer holds a lease on any part of an allocation, `free` is refused.
  bool lease(const void* address, int64_t nbytes);
  void end_lease(const void* address) noexcept;

  bool is_locked(const void* address, int64_t nbytes);
  bool is_managed(const void* address, int64_t nbytes);
  PinnedTotals totals();

 private:
  struct Allocation {
    int64_t nbytes = 0;
    bool locked = false;
    int leases = 0;
  };

  PinnedMemory();
  Allocation* find(const void* address, int64_t nbytes);
  void forget(const char* address) noexcept;
  static void before_fork() noexcept;
  static void after_fork_in_parent() noexcept;
  static void after_fork_in_child() noexcept;

  std::mutex mutex_;
  std::map<const char*, Allocation> allocations_;
  PinnedTotals totals_;
};

// A transfer's hold on memory of ours; on anybody else's it is nothing.
class PinnedLease {
 public:
  PinnedLease() = default;
  PinnedLease(const void* address, int64_t nbytes)
      : address_(PinnedMemory::instance().lease(address, nbytes) ? address : nullptr) {}
  PinnedLease(PinnedLease&& other) noexcept : address_(std::exchange(other.address_, nullptr)) {}
  PinnedLease& operator=(PinnedLease&& other) noexcept {
    std::swap(address_, other.address_);
    return *this;
  }
  ~PinnedLease() {
    if (address_ != nullptr) PinnedMemory::instance().end_lease(address_);
  }

 private:
  const void* address_ = nullptr;
};

// Owns one allocation from construction to destruction; what a tensor keeps alive.
class PinnedBuffer {
 public:
  PinnedBuffer(int64_t nbytes, Locking locking)
      : nbytes_(nbytes), address_(PinnedMemory::instance().allocate(nbytes, locking)) {}
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer() { PinnedMemory::instance().unmap(address_, nbytes_); }

  char* address() const noexcept { return address_; }
  int64_t nbytes() const noexcept { return nbytes_; }
  bool is_locked() const { return PinnedMemory::instance().is_locked(address_, nbytes_); }

 private:
  const int64_t nbytes_;
  char* const address_;
};

}  // namespace offload
