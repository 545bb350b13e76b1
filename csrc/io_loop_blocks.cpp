// The life of a block: cut from a transfer, placed in memory the device takes, sent, advanced, retired.
#include <algorithm>
#include <cstring>

#include "align.h"
#include "copy_past_cache.h"
#include "io_loop.h"

namespace offload {
namespace {

constexpr int kMostRetries = 1000;

}  // namespace

// Direct for whole pages, buffered for what is left at either end.
int64_t IoLoop::block_nbytes(const Extent& extent, int64_t position, bool& direct) const {
  const int64_t left = extent.nbytes - position;
  const int64_t alignment = extent.file->offset_alignment();
  const int64_t past_boundary = (extent.offset + position) & (alignment - 1);
  direct = extent.file->is_direct() && past_boundary == 0 && left >= alignment;
  if (direct) {
    const bool bounced = !is_aligned(extent.address + position, extent.file->memory_alignment());
    const int64_t most =
        std::max(bounced ? std::min(block_size_, BouncePool::kMostNbytes) : block_size_, alignment);
    return std::min(most, round_down(left, alignment));
  }
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
    block.transfer.reset();
    free_blocks_.push_back(&block);
    transfer->fail(error.failure());
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
  block.bounce = bounces_.lend(block.nbytes_total);
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
    if (!block.writing) {
      copy_past_cache(block.user_address, block.bounce, static_cast<size_t>(block.position));
    }
    bounces_.give_back(block.bounce, block.nbytes_total);
  }
  (block.writing ? counters_.bytes_written : counters_.bytes_read) += block.position;
  const std::shared_ptr<Transfer> transfer = std::move(block.transfer);
  transfer->nbytes_moved_ += block.position;
  --transfer->blocks_in_flight_;
  in_flight_.erase(&block);
  free_blocks_.push_back(&block);
  if (transfer->is_exhausted()) finish(transfer);
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
