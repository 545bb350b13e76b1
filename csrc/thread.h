// Our threads take no signals: handlers run on the caller's threads, and SIGXFSZ at the file-size limit stays
// pending on ours, so that the limit is an error (EFBIG) and never the end of the process.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace offload {

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// The name, at most 15 characters, is what ps, gdb and perf show.
template <class Body>
std::thread start_thread(const char* name, Body&& body) {
  const SignalsBlocked inherited_by_the_thread;
  std::thread thread(std::forward<Body>(body));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace offload
