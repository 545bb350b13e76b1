#include "io_loop.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "align.h"
#include "thread.h"

namespace offload {
namespace {

constexpr size_t kMostBounces = 16;
constexpr int kMostRetries = 1000;
constexpr int64_t kMostRequestBytes = 1 << 30;  // the kernel moves at most 2 GiB - 4 KiB per call

}  // namespace

IoLoop::IoLoop(std::unique_ptr<Backend> backend, int64_t block_size)
    : block_size_(std::min(block_size, kMostRequestBytes)),
      backend_(std::move(backend)),
      bounces_(std::max(block_size_, File::kMostAlignment), kMostBounces),
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
  if (sleeping_) backend_->wake();
  sleeping_ = false;
}

std::vector<uint64_t> IoLoop::take_finished() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(finished_, {});
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
  while (take_submissions()) {
    fill();
    push();
    backend_->wait(finished);
    for (Request* request : finished) on_complete(*static_cast<Block*>(request));
    finished.clear();
  }
}

bool IoLoop::take_submissions() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& transfer : submitted_) queues_[transfer->writing()].push_back(std::move(transfer));
  submitted_.clear();
  const bool idle = queues_[0].empty() && queues_[1].empty() && in_flight_.empty();
  sleeping_ = true;
  return !(stopping_ && idle);
}

void IoLoop::fill() {
  const auto depth = static_cast<size_t>(backend_->queue_depth());
  while (in_flight_.size() < depth) {
    const std::shared_ptr<Transfer> transfer = next_transfer();
    if (transfer == nullptr || !cut(transfer)) return;
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

// Direct for whole pages, buffered for what is left at either end.
int64_t IoLoop::block_nbytes(const Extent& extent, int64_t position, bool& direct) const {
  const int64_t left = extent.nbytes - position;
  const int64_t alignment = extent.file->offset_alignment();
  const int64_t past_boundary = (extent.offset + position) & (alignment - 1);
  direct = extent.file->is_direct() && past_boundary == 0 && left >= alignment;
  if (direct) return std::min(std::max(block_size_, alignment), round_down(left, alignment));
  if (!extent.file->is_direct()) return std::min(block_size_, left);
  return std::min(alignment - past_boundary, left);
}

// False when the block has to wait for a bounce buffer.
bool IoLoop::cut(const std::shared_ptr<Transfer>& transfer) {
  const Extent& extent = *transfer->current();
  const int64_t position = transfer->extent_position_;
  Block& block = *new_block();
  block.writing = transfer->writing();
  block.transfer = transfer;
  block.extent = &extent;
  block.user_address = extent.address + position;
  block.nbytes_total = block_nbytes(extent, position, block.direct);
  block.offset = extent.offset + position;
  try {
    if (!place(block)) {
      block.transfer.reset();
      free_blocks_.push_back(&block);
      return false;
    }
  } catch (const IoError& error) {
    block.transfer->fail(error.failure());
    block.transfer.reset();
    free_blocks_.push_back(&block);
    return true;
  }
  ++transfer->blocks_in_flight_;
  transfer->advance_cursor(block.nbytes_total);
  in_flight_.insert(&block);
  send(block);
  return true;
}

bool IoLoop::place(Block& block) {
  File& file = *block.extent->file;
  if (file.direct_wanted() && !file.is_direct()) note_fallback(file);
  block.fd = block.direct ? file.direct_fd() : file.buffered_fd();
  if (!block.direct || is_aligned(block.user_address, file.memory_alignment())) return true;
  block.bounce = bounces_.lend();
  if (block.bounce == nullptr) return false;
  counters_.bounced_bytes += block.nbytes_total;
  if (block.writing) std::memcpy(block.bounce, block.user_address, static_cast<size_t>(block.nbytes_total));
  return true;
}

void IoLoop::send(Block& block) {
  char* start = block.bounce != nullptr ? block.bounce : block.user_address;
  block.address = start + block.position;
  block.nbytes = block.nbytes_total - block.position;
  ready_.push_back(&block);
  ++counters_.requests;
}

void IoLoop::on_complete(Block& block) {
  const int64_t result = block.result;
  if (result > 0) return advance(block);
  if (result == 0) return fail(block, block.writing ? EIO : ENODATA);
  if (result == -EINVAL && block.direct) return use_buffered(block);
  const bool transient = result == -EAGAIN || result == -EINTR;
  if (!transient || ++block.retries > kMostRetries) return fail(block, static_cast<int>(-result));
  send(block);
}

void IoLoop::advance(Block& block) {
  int64_t progress = std::min(block.result, block.nbytes);
  const bool is_short = progress < block.nbytes;
  if (is_short) ++counters_.short_transfers;
  // O_DIRECT cannot go on from an unaligned offset: repeat from the last aligned one.
  if (is_short && block.direct) progress = round_down(progress, block.extent->file->offset_alignment());
  (block.direct ? counters_.direct_bytes : counters_.buffered_bytes) += progress;
  block.position += progress;
  block.offset += progress;
  if (block.position == block.nbytes_total) return retire(block);
  if (progress == 0) return use_buffered(block);
  send(block);
}

void IoLoop::note_fallback(const File& file) {
  ++counters_.direct_fallbacks;
  if (fallback_noted_) return;
  fallback_noted_ = true;
  note(file.path() + ": its file system refuses O_DIRECT, so transfers there go through the page cache");
}

// For the end of a file inside a page, and for file systems that take O_DIRECT at open and refuse it here.
void IoLoop::use_buffered(Block& block) {
  File& file = *block.extent->file;
  if (block.result == -EINVAL) {
    file.refuse_direct();
    note_fallback(file);
  }
  try {
    block.fd = file.buffered_fd();
  } catch (const IoError& error) {
    return fail(block, error.code());
  }
  block.direct = false;
  send(block);
}

void IoLoop::fail(Block& block, int code) {
  const Extent& extent = *block.extent;
  const char* call = block.writing ? "write" : "read";
  block.transfer->fail(
      IoFailure{code, call, extent.file->path(), extent.offset, block.transfer->nbytes(), 0});
  retire(block);
}

void IoLoop::retire(Block& block) {
  if (block.bounce != nullptr) {
    if (!block.writing) std::memcpy(block.user_address, block.bounce, static_cast<size_t>(block.position));
    bounces_.give_back(block.bounce);
  }
  (block.writing ? counters_.bytes_written : counters_.bytes_read) += block.position;
  const std::shared_ptr<Transfer> transfer = std::move(block.transfer);
  transfer->nbytes_moved_ += block.position;
  --transfer->blocks_in_flight_;
  in_flight_.erase(&block);
  free_blocks_.push_back(&block);
  if (transfer->is_exhausted()) finish(transfer);
}

void IoLoop::finish(const std::shared_ptr<Transfer>& transfer) {
  if (transfer->failure()) ++counters_.failures;
  transfer->finish();
  const std::lock_guard<std::mutex> lock(mutex_);
  finished_.push_back(transfer->id());
}

// The kernel refuses the backend itself: nobody will ever complete what is in flight.
void IoLoop::give_up(const IoFailure& failure) {
  std::vector<std::shared_ptr<Transfer>> lost;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    broken_ = std::make_unique<IoFailure>(failure);
    lost = std::exchange(submitted_, {});
    backend_.reset();  // cancels what it still holds
  }
  for (Block* block : in_flight_) lost.push_back(std::move(block->transfer));
  for (auto& queue : queues_) lost.insert(lost.end(), queue.begin(), queue.end());
  for (const auto& transfer : lost) {
    if (transfer->done()) continue;
    transfer->fail(failure);
    finish(transfer);
  }
}

IoLoop::Block* IoLoop::new_block() {
  if (free_blocks_.empty()) {
    blocks_.push_back(std::make_unique<Block>());
    return blocks_.back().get();
  }
  Block* block = free_blocks_.back();
  free_blocks_.pop_back();
  *block = Block{};
  return block;
}

}  // namespace offload
