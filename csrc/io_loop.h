// The one thread that owns a backend: cuts transfers into blocks, keeps them in flight, reads every
// completion.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "backend.h"
#include "bounce.h"
#include "overlap_order.h"
#include "transfer.h"

namespace offload {

struct IoCounters {
  std::atomic<int64_t> bytes_read{0};
  std::atomic<int64_t> bytes_written{0};
  std::atomic<int64_t> requests{0};
  std::atomic<int64_t> direct_bytes{0};
  std::atomic<int64_t> buffered_bytes{0};
  std::atomic<int64_t> bounced_bytes{0};
  std::atomic<int64_t> short_transfers{0};
  std::atomic<int64_t> direct_fallbacks{0};
  std::atomic<int64_t> failures{0};
};

class IoLoop {
 public:
  IoLoop(std::unique_ptr<Backend> backend, int64_t block_size);
  ~IoLoop();

  void stop();  // drains what was submitted; further submissions are refused
  void submit(std::shared_ptr<Transfer> transfer);
  std::vector<uint64_t> take_finished();
  // Waits until a transfer finishes; false when none is in flight.
  bool wait_for_progress();
  std::vector<std::string> take_notices();
  const IoCounters& counters() const noexcept { return counters_; }

 private:
  struct Block : Request {
    std::shared_ptr<Transfer> transfer;
    const Extent* extent = nullptr;
    char* user_address = nullptr;
    char* bounce = nullptr;
    int64_t nbytes_total = 0;
    int64_t position = 0;  // bytes of this block that have moved
    bool direct = false;
    int retries = 0;
  };

  void run();
  void run_until_stopped();
  void take_submissions();
  bool has_ended();
  void fill();
  void push();
  std::shared_ptr<Transfer> next_transfer();
  bool cut(const std::shared_ptr<Transfer>& transfer);
  int64_t block_nbytes(const Extent& extent, int64_t position, bool& direct) const;
  bool place(Block& block);
  void on_complete(Block& block);
  void advance(Block& block);
  void use_buffered(Block& block);
  void send(Block& block);
  void fail(Block& block, int code);
  void retire(Block& block);
  void finish(const std::shared_ptr<Transfer>& transfer);
  void enqueue(std::shared_ptr<Transfer> transfer);
  static void fail_unsent(Transfer& transfer, IoFailure failure);
  void give_up(const IoFailure& failure);
  Block* new_block();
  void note(const std::string& notice);
  void note_fallback(const File& file);

  const int64_t block_size_;
  std::unique_ptr<Backend> backend_;
  BouncePool bounces_;
  IoCounters counters_;

  std::mutex join_mutex_;
  std::mutex mutex_;  // guards what follows; never held while waiting
  std::condition_variable progressed_;
  uint64_t submitted_count_ = 0;
  uint64_t finished_count_ = 0;
  std::vector<std::shared_ptr<Transfer>> submitted_;
  std::vector<uint64_t> finished_;
  std::vector<std::string> notices_;
  bool sleeping_ = false;
  bool stopping_ = false;
  std::unique_ptr<IoFailure> broken_;

  // The thread's own.
  std::deque<std::shared_ptr<Transfer>> queues_[2];  // reads and writes take turns: a drive does both at once
  OverlapOrder order_;
  bool turn_ = false;
  bool fallback_noted_ = false;
  std::vector<Request*> ready_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> free_blocks_;
  std::unordered_set<Block*> in_flight_;

  std::thread thread_;  // last, so that it starts when all it uses is there
};

}  // namespace offload
