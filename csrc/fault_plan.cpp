#include "fault_plan.h"

namespace offload {
namespace {

// A request ends in one way: the first of these that it is meant to meet.
constexpr FaultKind kOutcomes[] = {FaultKind::kBroken, FaultKind::kBusy,   FaultKind::kEio,
                                   FaultKind::kEnospc, FaultKind::kEagain, FaultKind::kEintr,
                                   FaultKind::kShort};

bool possible(FaultKind kind, const Request& request) {
  if (kind == FaultKind::kEnospc) return request.writing;
  if (kind == FaultKind::kShort) return request.nbytes > 1;
  return true;
}

FaultSet with_one_outcome(FaultSet wanted, const Request& request) {
  bool decided = false;
  for (const FaultKind kind : kOutcomes) {
    const size_t at = index_of(kind);
    if (decided || !possible(kind, request)) wanted.reset(at);
    decided = decided || wanted.test(at);
  }
  return wanted;
}

}  // namespace

FaultSet FaultPlan::wanted() {
  FaultSet faults;
  const auto [first, last] = settings_.scheduled.equal_range(++request_count_);
  for (auto entry = first; entry != last; ++entry) faults.set(index_of(entry->second));
  std::uniform_real_distribution<double> chance(0, 1);
  for (const auto& [kind, rate] : settings_.rates) {
    if (chance(random_) < rate) faults.set(index_of(kind));
  }
  return faults;
}

FaultSet FaultPlan::draw(const Request& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const FaultSet faults = with_one_outcome(wanted(), request);
  for (size_t kind = 0; kind < kFaultKinds; ++kind) counts_[kind] += faults.test(kind);
  for (const FaultKind kind : {FaultKind::kEio, FaultKind::kEnospc}) {
    if (!faults.test(index_of(kind))) continue;
    hard_.push_back({kind, request.writing, request.offset, request.nbytes});
  }
  return faults;
}

int64_t FaultPlan::below(int64_t limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::uniform_int_distribution<int64_t>(0, limit - 1)(random_);
}

std::array<int64_t, kFaultKinds> FaultPlan::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

std::vector<InjectedFault> FaultPlan::hard() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return hard_;
}

}  // namespace offload
