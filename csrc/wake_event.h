// An eventfd: lets any thread end the I/O thread's wait in the kernel.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include "error.h"
#include "file.h"

namespace offload {

class WakeEvent {
 public:
  WakeEvent() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!descriptor_.is_open()) throw IoError(errno, "eventfd");
  }
  int fd() const noexcept { return descriptor_.fd(); }

  void signal() const noexcept {
    const uint64_t one = 1;
    // EAGAIN means that the counter is full, so the reader is going to wake anyway.
    [[maybe_unused]] const ssize_t written = ::write(fd(), &one, sizeof(one));
  }
  void clear() const noexcept {
    uint64_t count;
    [[maybe_unused]] const ssize_t taken = ::read(fd(), &count, sizeof(count));
  }

 private:
  Descriptor descriptor_;
};

}  // namespace offload
