// An open file: an O_DIRECT descriptor where the file system takes one, and its buffered twin.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace offload {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int fd() const noexcept { return fd_; }
  bool is_open() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;
  bool operator==(const FileIdentity& other) const { return device == other.device && inode == other.inode; }
};

enum class FileMode { kRead, kWrite, kReadWrite };

class File {
 public:
  static constexpr int64_t kMostAlignment = 1 << 16;  // coarser ones go through the page cache

  // Creates a missing file unless the mode is kRead. Refuses what is neither a regular file nor a block
  // device.
  File(const std::string& path, FileMode mode, bool direct = true);
  // Opens the file behind a caller's descriptor again, so that the caller may close his at any time.
  File(int fd, FileMode mode);

  const std::string& path() const noexcept { return path_; }
  const FileIdentity& identity() const noexcept { return identity_; }
  bool readable() const noexcept { return mode_ != FileMode::kWrite; }
  bool writable() const noexcept { return mode_ != FileMode::kRead; }

  bool is_direct() const noexcept { return direct_usable_.load(std::memory_order_relaxed); }
  bool direct_wanted() const noexcept { return direct_wanted_; }
  // Some file systems take O_DIRECT at open and refuse it at the transfer.
  void refuse_direct() noexcept { direct_usable_ = false; }
  int direct_fd() const noexcept { return direct_.fd(); }
  int buffered_fd();  // opened at first use, since aligned transfers never need it
  int64_t memory_alignment() const noexcept { return memory_alignment_; }
  int64_t offset_alignment() const noexcept { return offset_alignment_; }

  int64_t nbytes() const;
  void preallocate(int64_t nbytes);
  void sync();

 private:
  void open_descriptors(const std::string& source, bool direct);
  void read_facts();
  int open_again(int extra_flags) const;
  void forbid_readahead();
  int any_fd() const noexcept { return direct_.is_open() ? direct_.fd() : buffered_.fd(); }

  std::string path_;
  FileMode mode_;
  FileIdentity identity_;
  Descriptor direct_;
  Descriptor buffered_;
  std::mutex buffered_mutex_;
  bool direct_wanted_ = true;
  std::atomic<bool> direct_usable_{false};
  int64_t memory_alignment_ = 0;
  int64_t offset_alignment_ = 0;
};

}  // namespace offload
