// Wraps another backend and lets requests meet the faults of a plan; for tests.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <string>
#include <unordered_map>

#include "align.h"
#include "error.h"
#include "fault_plan.h"

namespace offload {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostRounds = 4;
constexpr char kScrub = 0x5a;

int error_of(const FaultSet& faults) {
  constexpr std::pair<FaultKind, int> kErrors[] = {{FaultKind::kEio, EIO},
                                                   {FaultKind::kEnospc, ENOSPC},
                                                   {FaultKind::kEagain, EAGAIN},
                                                   {FaultKind::kEintr, EINTR}};
  for (const auto& [kind, code] : kErrors) {
    if (faults.test(index_of(kind))) return code;
  }
  return 0;
}

// Only whole pages are sure to be taken by O_DIRECT.
bool may_be_direct(const Request& request) {
  return is_aligned(request.offset, kDefaultAlignment) && is_aligned(request.nbytes, kDefaultAlignment);
}

class FaultBackend final : public Backend {
 public:
  FaultBackend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)), name_(std::string("fault:") + inner_->name()) {}

  const char* name() const noexcept override { return name_.c_str(); }
  int queue_depth() const noexcept override { return inner_->queue_depth(); }
  void attach() override { inner_->attach(); }

  void wake() noexcept override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    woken_changed_.notify_one();
    inner_->wake();
  }

  size_t submit(Request* const* requests, size_t count) override {
    size_t taken = 0;
    while (taken < count && take(requests[taken])) ++taken;
    was_busy_ = taken < count;
    return taken;
  }

  void wait(std::vector<Request*>& finished) override {
    if (!passed_.empty() && !anything_due()) {
      wait_for_inner();
    } else if (!was_busy_) {
      sleep_until_due();
    }
    release(finished);
  }

 private:
  struct Passed {
    FaultSet faults;
    int64_t nbytes_wanted;
    int64_t nbytes_reported;
  };
  struct Held {
    Request* request;
    Clock::time_point due;
    int64_t rounds;  // how often others complete before it
  };

  bool take(Request* request) {
    const FaultSet faults = plan_->draw(*request);
    if (faults.test(index_of(FaultKind::kBroken))) throw IoError(EIO, "fault backend");
    if (faults.test(index_of(FaultKind::kBusy)) && !was_busy_) return false;
    const int code = error_of(faults);
    if (code == 0) return pass_on(request, faults);
    request->result = -code;
    hold(request, faults);
    return true;
  }

  bool pass_on(Request* request, const FaultSet& faults) {
    const int64_t wanted = request->nbytes;
    const bool is_short = faults.test(index_of(FaultKind::kShort));
    const int64_t reported = is_short ? 1 + plan_->below(wanted - 1) : wanted;
    request->nbytes = is_short && may_be_direct(*request) ? round_up(reported, kDefaultAlignment) : reported;
    if (inner_->submit(&request, 1) == 0) {
      request->nbytes = wanted;
      return false;
    }
    passed_[request] = {faults, wanted, reported};
    return true;
  }

  void take_back(Request* request) {
    const Passed passed = passed_.at(request);
    passed_.erase(request);
    // What moved beyond the reported bytes must not make up for a rest that nobody asks for.
    if (!request->writing && request->result > passed.nbytes_reported) {
      const int64_t beyond = request->result - passed.nbytes_reported;
      std::memset(request->address + passed.nbytes_reported, kScrub, static_cast<size_t>(beyond));
    }
    request->result = std::min(request->result, passed.nbytes_reported);
    request->nbytes = passed.nbytes_wanted;
    hold(request, passed.faults);
  }

  void hold(Request* request, const FaultSet& faults) {
    const bool late = faults.test(index_of(FaultKind::kDelay));
    const bool last = faults.test(index_of(FaultKind::kReorder));
    const auto delay = std::chrono::duration<double>(late ? plan_->delay_seconds() : 0);
    const auto due = Clock::now() + std::chrono::duration_cast<Clock::duration>(delay);
    held_.push_back({request, due, last ? 1 + plan_->below(kMostRounds) : 0});
  }

  void wait_for_inner() {
    std::vector<Request*> arrived;
    inner_->wait(arrived);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      woken_ = false;  // the caller looks for what is new after every wait
    }
    if (!arrived.empty()) {
      for (Held& held : held_) --held.rounds;
    }
    for (Request* request : arrived) take_back(request);
  }

  void sleep_until_due() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto woken = [this] { return woken_; };
    if (held_.empty()) {
      woken_changed_.wait(lock, woken);
    } else {
      const auto earlier = [](const Held& left, const Held& right) { return left.due < right.due; };
      woken_changed_.wait_until(lock, std::min_element(held_.begin(), held_.end(), earlier)->due, woken);
    }
    woken_ = false;
  }

  bool is_due(const Held& held) const {
    return held.due <= Clock::now() && (held.rounds <= 0 || passed_.empty());
  }
  bool anything_due() const {
    return std::any_of(held_.begin(), held_.end(), [this](const Held& held) { return is_due(held); });
  }

  void release(std::vector<Request*>& finished) {
    const auto late = [this](const Held& held) { return !is_due(held); };
    const auto due = std::stable_partition(held_.begin(), held_.end(), late);
    for (auto held = due; held != held_.end(); ++held) {
      const int64_t place = plan_->below(static_cast<int64_t>(finished.size()) + 1);
      finished.insert(finished.begin() + place, held->request);
    }
    held_.erase(due, held_.end());
  }

  std::unique_ptr<Backend> inner_;
  std::shared_ptr<FaultPlan> plan_;
  const std::string name_;
  bool was_busy_ = false;
  std::unordered_map<Request*, Passed> passed_;  // what the wrapped backend holds
  std::vector<Held> held_;

  std::mutex mutex_;
  std::condition_variable woken_changed_;
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultBackend>(std::move(inner), std::move(plan));
}

}  // namespace offload
