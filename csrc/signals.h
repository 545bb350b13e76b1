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

template <class Body>
std::thread start_thread(Body&& body) {
  const SignalsBlocked inherited_by_the_thread;
  return std::thread(std::forward<Body>(body));
}

}  // namespace offload
