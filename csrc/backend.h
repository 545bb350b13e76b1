// What moves bytes. A backend belongs to one I/O thread, which alone submits and waits; anyone may wake it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace offload {

// One system call's worth of a transfer.
struct Request {
  bool writing = false;
  int fd = -1;
  char* address = nullptr;
  int64_t nbytes = 0;
  int64_t offset = 0;
  int64_t result = 0;  // bytes moved or a negative errno, once it has finished
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const noexcept = 0;
  virtual int queue_depth() const noexcept = 0;
  // Called once by the I/O thread before anything else: io_uring ties a ring to the thread that enables it.
  virtual void attach() {}
  // Takes requests from the front and says how many; fewer than given means that the kernel is busy.
  virtual size_t submit(Request* const* requests, size_t count) = 0;
  // Blocks until something has finished or wake() was called; appends what has finished.
  virtual void wait(std::vector<Request*>& finished) = 0;
  virtual void wake() noexcept = 0;
};

std::unique_ptr<Backend> make_uring_backend(int queue_depth);
std::unique_ptr<Backend> make_libaio_backend(int queue_depth);
std::unique_ptr<Backend> make_posix_backend(int queue_depth, int thread_count);

struct BackendSettings {
  std::string name = "auto";
  int queue_depth = 0;
  int thread_count = 0;
};

struct BackendChoice {
  std::unique_ptr<Backend> backend;
  std::string reason;
  std::vector<std::string> notices;  // what the user should hear once
};

// "auto" takes the first of uring, libaio, posix that works; a name takes that one or throws.
BackendChoice choose_backend(const BackendSettings& settings);

struct BackendProbe {
  std::string name;
  bool usable = false;
  std::string detail;
};

std::vector<BackendProbe> probe_backends();

}  // namespace offload
