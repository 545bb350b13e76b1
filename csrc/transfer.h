// One ticket's work: extents to move, what has moved, the first error.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "error.h"
#include "file.h"
#include "pinned_memory.h"

namespace offload {

struct Extent {
  char* address = nullptr;
  int64_t nbytes = 0;
  std::shared_ptr<File> file;
  int64_t offset = 0;
  PinnedLease lease;
};

class Transfer {
 public:
  Transfer(uint64_t id, bool writing, std::vector<Extent> extents)
      : id_(id), writing_(writing), extents_(std::move(extents)) {
    for (const Extent& extent : extents_) nbytes_ += extent.nbytes;
    advance_cursor(0);  // past extents that are empty
  }

  uint64_t id() const noexcept { return id_; }
  bool writing() const noexcept { return writing_; }
  int64_t nbytes() const noexcept { return nbytes_; }
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

  // True once done; a negative time waits for ever.
  bool wait_for(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (seconds < 0) {
      changed_.wait(lock, [this] { return done(); });
      return true;
    }
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done(); });
  }

  // Final once done; before that, how far it has come.
  int64_t nbytes_moved() const noexcept { return nbytes_moved_.load(std::memory_order_relaxed); }
  // To be read once done.
  const std::optional<IoFailure>& failure() const noexcept { return failure_; }

 private:
  friend class IoLoop;  // its thread alone moves the state below
  friend class OverlapOrder;

  const Extent* current() const {
    return extent_index_ < extents_.size() ? &extents_[extent_index_] : nullptr;
  }
  void advance_cursor(int64_t nbytes) {
    extent_position_ += nbytes;
    while (extent_index_ < extents_.size() && extent_position_ == extents_[extent_index_].nbytes) {
      ++extent_index_;
      extent_position_ = 0;
    }
  }
  void fail(IoFailure failure) {
    if (!failure_) failure_ = std::move(failure);
    extent_index_ = extents_.size();  // what is in flight drains, nothing follows
  }
  bool is_exhausted() const { return blocks_in_flight_ == 0 && current() == nullptr; }
  void finish() {
    if (failure_) failure_->nbytes_moved = nbytes_moved();
    extents_.clear();  // closes files that nobody else holds
    const std::lock_guard<std::mutex> lock(mutex_);
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
  }

  const uint64_t id_;
  const bool writing_;
  std::vector<Extent> extents_;
  int64_t nbytes_ = 0;
  std::atomic<int64_t> nbytes_moved_{0};
  size_t extent_index_ = 0;
  int64_t extent_position_ = 0;
  int blocks_in_flight_ = 0;
  int waits_for_ = 0;
  std::vector<std::shared_ptr<Transfer>> followers_;
  std::optional<IoFailure> failure_;
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace offload
