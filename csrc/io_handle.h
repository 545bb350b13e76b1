// A handle: checks its settings, picks a backend, shares open files among transfers.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "fault_plan.h"
#include "file.h"
#include "io_loop.h"
#include "transfer.h"

namespace offload {

struct HandleSettings {
  std::string backend = "auto";
  int64_t block_size = 0;
  int64_t queue_depth = 0;
  int64_t thread_count = 0;
  std::shared_ptr<FaultPlan> faults;  // of tests
};

class IoHandle {
 public:
  explicit IoHandle(HandleSettings settings);
  IoHandle(const IoHandle&) = delete;
  IoHandle& operator=(const IoHandle&) = delete;
  ~IoHandle();

  // One File for all transfers in flight under a name, as long as the name means the same file.
  std::shared_ptr<File> open(const std::string& path, bool writing);
  std::shared_ptr<Transfer> submit(bool writing, std::vector<Extent> extents);
  void close();  // drains first

  std::vector<uint64_t> take_finished();
  std::vector<std::string> take_notices();
  const IoCounters& counters() const { return loop().counters(); }

  const std::string& backend() const noexcept { return backend_; }
  const std::string& backend_reason() const noexcept { return backend_reason_; }
  int64_t block_size() const noexcept { return settings_.block_size; }
  int64_t queue_depth() const noexcept { return queue_depth_; }

 private:
  IoLoop& loop() const;
  void check_settings();
  template <class Open>
  auto patiently(Open open);
  void forget_closed_files();

  HandleSettings settings_;
  const pid_t owner_;
  std::string backend_;
  std::string backend_reason_;
  int64_t queue_depth_ = 0;
  std::atomic<uint64_t> next_id_{1};
  std::mutex mutex_;  // guards the three below
  std::unordered_map<std::string, std::weak_ptr<File>> files_;
  size_t sweep_at_ = 64;
  std::vector<std::string> notices_;
  std::unique_ptr<IoLoop> loop_;
};

}  // namespace offload
