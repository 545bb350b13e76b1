// Which faults a handle under test meets: at random with a seed, at given requests, and a log of both.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "backend.h"

namespace offload {

enum class FaultKind {
  kEio,      // the device fails
  kEnospc,   // the drive is full; writes only
  kEagain,   // the kernel asks to try again
  kEintr,    // a signal came first
  kShort,    // fewer bytes move than were asked for
  kDelay,    // the completion comes late
  kReorder,  // others complete first
  kBusy,     // the kernel takes no request now
  kBroken,   // the backend itself fails, for good
};
constexpr size_t kFaultKinds = 9;
using FaultSet = std::bitset<kFaultKinds>;
constexpr size_t index_of(FaultKind kind) { return static_cast<size_t>(kind); }

struct InjectedFault {
  FaultKind kind;
  bool writing;
  int64_t offset;
  int64_t nbytes;
};

// May be shared by handles; requests are numbered from 1 in the order in which backends are offered them.
class FaultPlan {
 public:
  struct Settings {
    uint64_t seed = 0;
    std::map<FaultKind, double> rates;
    std::multimap<int64_t, FaultKind> scheduled;
    double delay_seconds = 0.001;
  };
  explicit FaultPlan(Settings settings) : settings_(std::move(settings)), random_(settings_.seed) {}

  FaultSet draw(const Request& request);
  int64_t below(int64_t limit);  // a random number from 0
  double delay_seconds() const noexcept { return settings_.delay_seconds; }

  std::array<int64_t, kFaultKinds> counts() const;
  std::vector<InjectedFault> hard() const;  // every EIO and ENOSPC so far

 private:
  FaultSet wanted();

  const Settings settings_;
  mutable std::mutex mutex_;  // guards what follows
  std::mt19937_64 random_;
  int64_t request_count_ = 0;
  std::array<int64_t, kFaultKinds> counts_{};
  std::vector<InjectedFault> hard_;
};

std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan);

}  // namespace offload
