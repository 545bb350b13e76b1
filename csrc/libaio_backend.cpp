#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "backend.h"
#include "error.h"
#include "wake_event.h"

// Raw system calls: the kernel's headers suffice, and the wheel depends on no libaio package.
namespace offload {
namespace {

constexpr size_t kEventBatch = 64;

class Context {
 public:
  explicit Context(int nevents) {
    if (::syscall(SYS_io_setup, nevents, &id_) < 0) throw IoError(errno, "io_setup");
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { ::syscall(SYS_io_destroy, id_); }

  // Both give -errno, as io_uring does.
  long submit(iocb** blocks, size_t count) const {
    const long taken = ::syscall(SYS_io_submit, id_, static_cast<long>(count), blocks);
    return taken < 0 ? -errno : taken;
  }
  long wait(io_event* events, size_t count) const {
    const long seen = ::syscall(SYS_io_getevents, id_, 1L, static_cast<long>(count), events, nullptr);
    return seen < 0 ? -errno : seen;
  }

 private:
  aio_context_t id_ = 0;
};

class LibaioBackend final : public Backend {
 public:
  explicit LibaioBackend(int queue_depth) : context_(queue_depth + 1), queue_depth_(queue_depth) {
    blocks_.resize(static_cast<size_t>(queue_depth));
    free_.reserve(blocks_.size());
    for (iocb& block : blocks_) free_.push_back(&block);
    poll_event();
  }

  const char* name() const noexcept override { return "libaio"; }
  int queue_depth() const noexcept override { return queue_depth_; }
  void wake() noexcept override { event_.signal(); }

  size_t submit(Request* const* requests, size_t count) override {
    std::array<iocb*, kEventBatch> batch;
    size_t done = 0;
    while (done < count) {
      const size_t wanted = std::min({count - done, batch.size(), free_.size()});
      for (size_t i = 0; i < wanted; ++i) batch[i] = prepare(requests[done + i], free_[free_.size() - 1 - i]);
      const size_t taken = wanted == 0 ? 0 : submit_batch(batch.data(), wanted);
      free_.resize(free_.size() - taken);
      if (returned_ != nullptr) free_.push_back(std::exchange(returned_, nullptr));
      done += taken;
      if (taken < wanted || wanted == 0) break;
    }
    return done;
  }

  void wait(std::vector<Request*>& finished) override {
    finished.insert(finished.end(), refused_.begin(), refused_.end());
    refused_.clear();
    if (!finished.empty()) return;
    std::array<io_event, kEventBatch> events;
    long seen;
    do {
      seen = context_.wait(events.data(), events.size());
    } while (seen == -EINTR);
    if (seen < 0) throw IoError(static_cast<int>(-seen), "io_getevents");
    for (long i = 0; i < seen; ++i) finish(events[static_cast<size_t>(i)], finished);
  }

 private:
  static iocb* prepare(Request* request, iocb* block) {
    *block = iocb{};
    block->aio_lio_opcode = request->writing ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block->aio_fildes = static_cast<uint32_t>(request->fd);
    block->aio_buf = reinterpret_cast<uintptr_t>(request->address);
    block->aio_nbytes = static_cast<uint64_t>(request->nbytes);
    block->aio_offset = request->offset;
    block->aio_data = reinterpret_cast<uintptr_t>(request);
    return block;
  }

  // The kernel refuses a batch only for its first block, and then names the reason of that one.
  size_t submit_batch(iocb** batch, size_t count) {
    long taken;
    do {
      taken = context_.submit(batch, count);
    } while (taken == -EINTR);
    if (taken >= 0) return static_cast<size_t>(taken);
    if (taken == -EAGAIN) return 0;
    auto* request = reinterpret_cast<Request*>(batch[0]->aio_data);
    request->result = taken;
    refused_.push_back(request);
    returned_ = batch[0];
    return 1;
  }

  void finish(const io_event& event, std::vector<Request*>& finished) {
    auto* block = reinterpret_cast<iocb*>(event.obj);
    if (block == &poll_) {
      event_.clear();
      return poll_event();
    }
    auto* request = reinterpret_cast<Request*>(event.data);
    request->result = event.res;
    free_.push_back(block);
    finished.push_back(request);
  }

  void poll_event() {
    poll_ = iocb{};
    poll_.aio_lio_opcode = IOCB_CMD_POLL;
    poll_.aio_fildes = static_cast<uint32_t>(event_.fd());
    poll_.aio_buf = POLLIN;
    iocb* block = &poll_;
    const long taken = context_.submit(&block, 1);
    if (taken < 0) throw IoError(static_cast<int>(-taken), "io_submit of a poll (needs Linux 4.18)");
  }

  WakeEvent event_;
  Context context_;
  int queue_depth_;
  iocb poll_{};
  std::vector<iocb> blocks_;
  std::vector<iocb*> free_;
  std::vector<Request*> refused_;
  iocb* returned_ = nullptr;
};

}  // namespace

std::unique_ptr<Backend> make_libaio_backend(int queue_depth) {
  return std::make_unique<LibaioBackend>(queue_depth);
}

}  // namespace offload
