#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "backend.h"
#include "thread.h"

namespace offload {
namespace {

int64_t transfer(const Request& request) {
  const auto nbytes = static_cast<size_t>(request.nbytes);
  ssize_t moved;
  do {
    moved = request.writing ? ::pwrite(request.fd, request.address, nbytes, request.offset)
                            : ::pread(request.fd, request.address, nbytes, request.offset);
  } while (moved < 0 && errno == EINTR);
  return moved < 0 ? -errno : moved;
}

class PosixBackend final : public Backend {
 public:
  PosixBackend(int queue_depth, int thread_count) : queue_depth_(queue_depth) {
    try {
      for (int i = 0; i < thread_count; ++i)
        threads_.push_back(start_thread("offload-posix", [this] { work(); }));
    } catch (const std::system_error& error) {
      if (threads_.empty()) throw;  // some threads are enough
    }
  }
  ~PosixBackend() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    work_arrived_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const char* name() const noexcept override { return "posix"; }
  int queue_depth() const noexcept override { return queue_depth_; }

  size_t submit(Request* const* requests, size_t count) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting_.insert(waiting_.end(), requests, requests + count);
    }
    if (count == 1) work_arrived_.notify_one();
    if (count > 1) work_arrived_.notify_all();
    return count;
  }

  void wait(std::vector<Request*>& finished) override {
    std::unique_lock<std::mutex> lock(mutex_);
    work_done_.wait(lock, [this] { return woken_ || !finished_.empty(); });
    woken_ = false;
    finished.insert(finished.end(), finished_.begin(), finished_.end());
    finished_.clear();
  }

  void wake() noexcept override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    work_done_.notify_one();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_arrived_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Request* request = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      request->result = transfer(*request);
      lock.lock();
      finished_.push_back(request);
      work_done_.notify_one();
    }
  }

  const int queue_depth_;
  std::mutex mutex_;
  std::condition_variable work_arrived_;
  std::condition_variable work_done_;
  std::deque<Request*> waiting_;
  std::vector<Request*> finished_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // last, so that they start when all they use is there
};

}  // namespace

std::unique_ptr<Backend> make_posix_backend(int queue_depth, int thread_count) {
  return std::make_unique<PosixBackend>(queue_depth, thread_count);
}

}  // namespace offload
