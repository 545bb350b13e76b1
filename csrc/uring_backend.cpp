#include "backend.h"
#include "error.h"

#ifdef OFFLOAD_HAVE_LIBURING

#include <liburing.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "wake_event.h"

namespace offload {
namespace {

class Ring {
 public:
  explicit Ring(unsigned entries) {
    // One thread submits and reaps, so completions need no interrupt of it: measured 5 % less CPU time.
    constexpr unsigned kSingleThread =
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED;
    int code = initialise(entries, kSingleThread);
    if (code == -EINVAL) code = initialise(entries, 0);  // a kernel before 6.1
    if (code < 0) throw IoError(-code, "io_uring_queue_init");
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { io_uring_queue_exit(&ring_); }

  io_uring* get() noexcept { return &ring_; }
  void enable() {
    if ((flags_ & IORING_SETUP_R_DISABLED) == 0) return;
    // Not by liburing's function of that name: Debian's 2.3 declares it and does not export it.
    const long code =
        ::syscall(SYS_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
    if (code < 0) throw IoError(errno, "io_uring_register of the ring's thread");
  }

 private:
  int initialise(unsigned entries, unsigned flags) {
    io_uring_params params{};
    params.flags = flags | IORING_SETUP_CLAMP;
    flags_ = flags;
    return io_uring_queue_init_params(entries, &ring_, &params);
  }

  io_uring ring_{};
  unsigned flags_ = 0;
};

class UringBackend final : public Backend {
 public:
  // One entry more than the depth: the wake event is polled through the ring as well.
  explicit UringBackend(int queue_depth) : ring_(static_cast<unsigned>(queue_depth) + 1) {
    queue_depth_ = std::min(queue_depth, static_cast<int>(ring_.get()->sq.ring_entries) - 1);
  }

  const char* name() const noexcept override { return "uring"; }
  int queue_depth() const noexcept override { return queue_depth_; }
  void attach() override { ring_.enable(); }
  void wake() noexcept override { event_.signal(); }

  size_t submit(Request* const* requests, size_t count) override {
    size_t taken = 0;
    for (; taken < count; ++taken) {
      io_uring_sqe* entry = io_uring_get_sqe(ring_.get());
      if (entry == nullptr) break;
      prepare(entry, requests[taken]);
    }
    return taken;  // wait() hands them to the kernel, in the same system call
  }

  void wait(std::vector<Request*>& finished) override {
    poll_event();
    int code;
    do {
      code = io_uring_submit_and_wait(ring_.get(), 1);
    } while (code == -EINTR);
    const bool busy =
        code == -EAGAIN || code == -EBUSY;  // completions must be taken first, or memory is short
    if (code < 0 && !busy) throw IoError(-code, "io_uring_enter");
    collect(finished);
    if (busy && finished.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  static void prepare(io_uring_sqe* entry, Request* request) {
    const auto nbytes = static_cast<unsigned>(request->nbytes);
    const auto offset = static_cast<uint64_t>(request->offset);
    if (request->writing) {
      io_uring_prep_write(entry, request->fd, request->address, nbytes, offset);
    } else {
      io_uring_prep_read(entry, request->fd, request->address, nbytes, offset);
    }
    io_uring_sqe_set_data(entry, request);
  }

  void poll_event() {
    if (event_polled_) return;
    io_uring_sqe* entry = io_uring_get_sqe(ring_.get());
    if (entry == nullptr) return;
    io_uring_prep_poll_add(entry, event_.fd(), POLLIN);
    io_uring_sqe_set_data(entry, nullptr);
    event_polled_ = true;
  }

  void collect(std::vector<Request*>& finished) {
    unsigned head;
    unsigned seen = 0;
    io_uring_cqe* completion;
    io_uring_for_each_cqe(ring_.get(), head, completion) {
      ++seen;
      auto* request = static_cast<Request*>(io_uring_cqe_get_data(completion));
      if (request == nullptr) {
        event_.clear();
        event_polled_ = false;
        continue;
      }
      request->result = completion->res;
      finished.push_back(request);
    }
    io_uring_cq_advance(ring_.get(), seen);
  }

  WakeEvent event_;
  Ring ring_;
  int queue_depth_ = 0;
  bool event_polled_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(int queue_depth) {
  return std::make_unique<UringBackend>(queue_depth);
}

}  // namespace offload

#else

namespace offload {

std::unique_ptr<Backend> make_uring_backend(int) {
  throw IoError(ENOSYS, "io_uring (built without liburing: install liburing-dev and build again)");
}

}  // namespace offload

#endif
