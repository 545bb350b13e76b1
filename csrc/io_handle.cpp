#include "io_handle.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "align.h"
#include "error.h"

namespace offload {
namespace {

constexpr int64_t kMostThreads = 256;

void require_positive(const char* name, int64_t value) {
  if (value > 0) return;
  throw std::invalid_argument(std::string(name) + " must be at least 1, not " + std::to_string(value));
}

bool still_names(const std::string& path, const File& file) {
  struct stat facts;
  if (::stat(path.c_str(), &facts) != 0) return false;
  return file.identity() == FileIdentity{facts.st_dev, facts.st_ino};
}

void check_extent(bool writing, const Extent& extent) {
  if (extent.offset < 0) {
    throw std::invalid_argument("offset must not be negative: " + std::to_string(extent.offset));
  }
  if (extent.nbytes < 0) throw std::invalid_argument("nbytes must not be negative");
  if (extent.nbytes > std::numeric_limits<int64_t>::max() - kDefaultAlignment - extent.offset) {
    throw std::invalid_argument("offset + nbytes exceeds the largest file");
  }
  if (writing ? extent.file->writable() : extent.file->readable()) return;
  throw std::invalid_argument(extent.file->path() + " is not open for " + (writing ? "writing" : "reading"));
}

}  // namespace

IoHandle::IoHandle(HandleSettings settings) : settings_(std::move(settings)), owner_(::getpid()) {
  check_settings();
  const auto thread_count = static_cast<int>(std::min(settings_.thread_count, kMostThreads));
  const auto queue_depth =
      static_cast<int>(std::min<int64_t>(settings_.queue_depth, std::numeric_limits<int>::max() / 4));
  BackendChoice choice = choose_backend({settings_.backend, queue_depth, thread_count});
  if (settings_.faults) choice.backend = make_fault_backend(std::move(choice.backend), settings_.faults);
  backend_ = choice.backend->name();
  backend_reason_ = std::move(choice.reason);
  queue_depth_ = choice.backend->queue_depth();
  notices_.insert(notices_.end(), choice.notices.begin(), choice.notices.end());
  loop_ = std::make_unique<IoLoop>(std::move(choice.backend), settings_.block_size);
}

IoHandle::~IoHandle() {
  // A fork leaves the child a copy of the handle without its thread: to join it would wait for ever.
  if (::getpid() != owner_) [[maybe_unused]]
    auto* abandoned = loop_.release();
}

void IoHandle::check_settings() {
  require_positive("block_size", settings_.block_size);
  require_positive("queue_depth", settings_.queue_depth);
  require_positive("intra_op_parallelism", settings_.thread_count);
  const int64_t rounded =
      round_up(std::min<int64_t>(settings_.block_size, int64_t{1} << 40), kDefaultAlignment);
  if (rounded == settings_.block_size) return;
  notices_.push_back("block_size " + std::to_string(settings_.block_size) + " is no multiple of " +
                     std::to_string(kDefaultAlignment) + ": using " + std::to_string(rounded));
  settings_.block_size = rounded;
}

IoLoop& IoHandle::loop() const {
  if (::getpid() != owner_) {
    throw std::runtime_error("this handle belongs to process " + std::to_string(owner_) +
                             ": make a new one after the fork");
  }
  return *loop_;
}

// Many transfers to many files can use up the descriptors; as they finish, they give theirs back.
template <class Open>
auto IoHandle::patiently(Open open) {
  for (;;) {
    try {
      return open();
    } catch (const IoError& error) {
      if (error.code() != EMFILE || !loop().wait_for_progress()) throw;
    }
  }
}

std::shared_ptr<File> IoHandle::open(const std::string& path, bool writing) {
  const std::string key = (writing ? 'w' : 'r') + path;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = files_.find(key);
    if (known != files_.end()) {
      if (std::shared_ptr<File> file = known->second.lock(); file && still_names(path, *file)) return file;
    }
  }
  const FileMode mode = writing ? FileMode::kWrite : FileMode::kRead;
  auto file = patiently([&] { return std::make_shared<File>(path, mode); });
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_closed_files();
  files_[key] = file;
  return file;
}

void IoHandle::forget_closed_files() {
  if (files_.size() < sweep_at_) return;
  for (auto entry = files_.begin(); entry != files_.end();) {
    entry = entry->second.expired() ? files_.erase(entry) : std::next(entry);
  }
  sweep_at_ = std::max<size_t>(64, 2 * files_.size());
}

std::shared_ptr<Transfer> IoHandle::submit(bool writing, std::vector<Extent> extents) {
  for (const Extent& extent : extents) {
    check_extent(writing, extent);
    const int64_t alignment = extent.file->offset_alignment();
    const bool whole_pages = is_aligned(extent.offset, alignment) && is_aligned(extent.nbytes, alignment);
    if (!whole_pages) patiently([&] { return extent.file->buffered_fd(); });
  }
  auto transfer = std::make_shared<Transfer>(next_id_++, writing, std::move(extents));
  loop().submit(transfer);
  return transfer;
}

void IoHandle::close() { loop().stop(); }

std::vector<uint64_t> IoHandle::take_finished() { return loop().take_finished(); }

std::vector<std::string> IoHandle::take_notices() {
  std::vector<std::string> notices = loop().take_notices();
  const std::lock_guard<std::mutex> lock(mutex_);
  notices.insert(notices.begin(), notices_.begin(), notices_.end());
  notices_.clear();
  return notices;
}

}  // namespace offload
