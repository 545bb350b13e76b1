#include "io_loop.h"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "align.h"
#include "thread.h"

namespace offload {
namespace {

constexpr int64_t kMostRequestBytes = 1 << 30;  // the kernel moves at most 2 GiB - 4 KiB per call

}  // namespace

IoLoop::IoLoop(std::unique_ptr<Backend> backend, int64_t block_size)
    : block_size_(std::min(block_size, kMostRequestBytes)),
      backend_(std::move(backend)),
      thread_(start_thread("offload-io", [this] { run(); })) {}

IoLoop::~IoLoop() { stop(); }

void IoLoop::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (backend_ != nullptr) backend_->wake();
  }
  const std::lock_guard<std::mutex> lock(
      join_mutex_);  // a second caller returns when the first one has drained
  if (thread_.joinable()) thread_.join();
}

void IoLoop::submit(std::shared_ptr<Transfer> transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) throw std::invalid_argument("the handle is closed");
  if (broken_) throw IoError(*broken_);
  submitted_.push_back(std::move(transfer));
  ++submitted_count_;
  if (sleeping_) backend_->wake();
  sleeping_ = false;
}

std::vector<uint64_t> IoLoop::take_finished() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(finished_, {});
}

bool IoLoop::wait_for_progress() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t before = finished_count_;
  if (before == submitted_count_) return false;
  progressed_.wait(lock, [&] { return finished_count_ != before; });
  return true;
}

std::vector<std::string> IoLoop::take_notices() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(notices_, {});
}

void IoLoop::note(const std::string& notice) {
  const std::lock_guard<std::mutex> lock(mutex_);
  notices_.push_back(notice);
}

void IoLoop::run() {
  try {
    backend_->attach();
    run_until_stopped();
  } catch (const IoError& error) {
    give_up(error.failure());
  } catch (const std::bad_alloc&) {
    give_up(IoFailure{ENOMEM, "I/O thread", "", 0, 0, 0});
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  sleeping_ = false;
  backend_.reset();
}

void IoLoop::run_until_stopped() {
  std::vector<Request*> finished;
  for (;;) {
    take_submissions();
    fill();
    push();
    if (has_ended()) return;
    backend_->wait(finished);
    for (Request* request : finished) on_complete(*static_cast<Block*>(request));
    finished.clear();
  }
}

void IoLoop::take_submissions() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& transfer : submitted_) {
    if (order_.enter(transfer)) enqueue(std::move(transfer));
  }
  submitted_.clear();
  sleeping_ = true;
}

// To be asked after fill(), which takes out of the queues what has been sent whole.
bool IoLoop::has_ended() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stopping_ && submitted_.empty() && queues_[0].empty() && queues_[1].empty() && in_flight_.empty();
}

void IoLoop::fill() {
  const auto depth = static_cast<size_t>(backend_->queue_depth());
  int refusals = 0;  // the other direction may not need what this one waits for
  while (in_flight_.size() < depth && refusals < 2) {
    const std::shared_ptr<Transfer> transfer = next_transfer();
    if (transfer == nullptr) return;
    refusals = cut(transfer) ? 0 : refusals + 1;
    if (transfer->is_exhausted()) finish(transfer);
  }
}

void IoLoop::push() {
  const size_t taken = backend_->submit(ready_.data(), ready_.size());
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(taken));
}

std::shared_ptr<Transfer> IoLoop::next_transfer() {
  for (int tries = 0; tries < 2; ++tries) {
    turn_ = !turn_;
    auto& queue = queues_[turn_];
    while (!queue.empty() && queue.front()->current() == nullptr) {
      if (queue.front()->is_exhausted() && !queue.front()->done()) finish(queue.front());  // it was empty
      queue.pop_front();
    }
    if (!queue.empty()) return queue.front();
  }
  return nullptr;
}

void IoLoop::enqueue(std::shared_ptr<Transfer> transfer) {
  auto& queue = queues_[transfer->writing()];
  queue.push_back(std::move(transfer));
}

void IoLoop::finish(const std::shared_ptr<Transfer>& transfer) {
  if (transfer->failure()) ++counters_.failures;
  for (auto& follower : order_.leave(*transfer)) enqueue(std::move(follower));
  transfer->finish();
  const std::lock_guard<std::mutex> lock(mutex_);
  finished_.push_back(transfer->id());
  ++finished_count_;
  progressed_.notify_all();
}

void IoLoop::fail_unsent(Transfer& transfer, IoFailure failure) {
  if (!transfer.extents_.empty()) {
    failure.path = transfer.extents_.front().file->path();
    failure.offset = transfer.extents_.front().offset;
  }
  failure.nbytes_wanted = transfer.nbytes();
  transfer.fail(std::move(failure));
}

// The kernel refuses the backend itself: nobody will ever complete what is in flight.
void IoLoop::give_up(const IoFailure& failure) {
  std::vector<std::shared_ptr<Transfer>> submitted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    broken_ = std::make_unique<IoFailure>(failure);
    submitted = std::exchange(submitted_, {});
    backend_.reset();  // cancels what it still holds
  }
  for (auto& transfer : submitted) {
    if (order_.enter(transfer)) enqueue(std::move(transfer));
  }
  for (Block* block : in_flight_) enqueue(std::move(block->transfer));
  while (!queues_[0].empty() || !queues_[1].empty()) {
    auto& queue = queues_[queues_[0].empty()];
    const std::shared_ptr<Transfer> transfer = std::move(queue.front());
    queue.pop_front();
    if (transfer->done()) continue;
    fail_unsent(*transfer, failure);
    finish(transfer);
  }
}

}  // namespace offload
