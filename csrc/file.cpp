#include "file.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <stdexcept>

#include "align.h"
#include "error.h"

namespace offload {
namespace {

int flags_of(FileMode mode) {
  switch (mode) {
    case FileMode::kRead:
      return O_RDONLY;
    case FileMode::kWrite:
      return O_WRONLY | O_CREAT;
    case FileMode::kReadWrite:
      return O_RDWR | O_CREAT;
  }
  throw std::invalid_argument("unknown file mode");
}

int open_retrying(const char* path, int flags) {
  int fd;
  do {
    fd = ::open(path, flags | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

std::string link_of(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

std::string target_of(int fd) {
  char target[PATH_MAX];
  const ssize_t length = ::readlink(link_of(fd).c_str(), target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : "descriptor " + std::to_string(fd);
}

void check_kind(mode_t mode, const std::string& path) {
  if (S_ISDIR(mode)) throw IoError(EISDIR, "open", path);
  // A named pipe would block the open, and none but these two have offsets.
  if (!S_ISREG(mode) && !S_ISBLK(mode)) throw IoError(ESPIPE, "open", path);
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

File::File(const std::string& path, FileMode mode, bool direct) : path_(path), mode_(mode) {
  if (path.find('\0') != std::string::npos) throw std::invalid_argument("path contains a null byte");
  struct stat facts;
  if (::stat(path.c_str(), &facts) == 0) check_kind(facts.st_mode, path_);
  open_descriptors(path, direct);
}

File::File(int fd, FileMode mode) : path_(target_of(fd)), mode_(mode) {
  struct stat facts;
  if (::fstat(fd, &facts) != 0) throw IoError(errno, "fstat", path_);
  check_kind(facts.st_mode, path_);
  try {
    open_descriptors(link_of(fd), true);
  } catch (const IoError&) {  // no /proc, or the file's permissions allow less than the descriptor does
    buffered_ = Descriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!buffered_.is_open()) throw IoError(errno, "fcntl", path_);
    read_facts();
  }
}

void File::open_descriptors(const std::string& source, bool direct) {
  direct_wanted_ = direct;
  if (direct) {
    direct_ = Descriptor(open_retrying(source.c_str(), flags_of(mode_) | O_DIRECT));
    if (!direct_.is_open() && errno != EINVAL) throw IoError(errno, "open", path_);
  }
  if (!direct_.is_open()) {
    buffered_ = Descriptor(open_retrying(source.c_str(), flags_of(mode_)));
    if (!buffered_.is_open()) throw IoError(errno, "open", path_);
  }
  direct_usable_ = direct_.is_open();
  read_facts();
}

void File::read_facts() {
  struct stat facts;
  if (::fstat(any_fd(), &facts) != 0) throw IoError(errno, "fstat", path_);
  identity_ = {facts.st_dev, facts.st_ino};
  memory_alignment_ = kDefaultAlignment;
  offset_alignment_ = std::max(kDefaultAlignment, page_size());
#ifdef STATX_DIOALIGN
  struct statx wide;
  if (::statx(any_fd(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &wide) != 0) return;
  if ((wide.stx_mask & STATX_DIOALIGN) == 0) return;
  if (wide.stx_dio_offset_align == 0) direct_usable_ = false;
  memory_alignment_ = std::max<int64_t>(wide.stx_dio_mem_align, 1);
  // Never finer than a page: the direct and the buffered part of a file must not share one, or writing back
  // the buffered part would undo the direct one.
  offset_alignment_ = std::max<int64_t>(wide.stx_dio_offset_align, offset_alignment_);
  if (offset_alignment_ > kMostAlignment) direct_usable_ = false;
#endif
}

int File::open_again(int extra_flags) const {
  const int flags = (flags_of(mode_) & ~O_CREAT) | extra_flags;
  // Through /proc it is the same file even when its name is gone or means another one by now.
  const int fd = open_retrying(link_of(any_fd()).c_str(), flags);
  return fd >= 0 ? fd : open_retrying(path_.c_str(), flags);
}

// Readahead puts pages that are being written directly into the page cache, in one folio with pages that this
// descriptor then makes dirty: the kernel cannot drop such a folio when the direct write ends, later buffered
// reads see the old data, and the next fsync() fails with EIO.
void File::forbid_readahead() { ::posix_fadvise(buffered_.fd(), 0, 0, POSIX_FADV_RANDOM); }

int File::buffered_fd() {
  const std::lock_guard<std::mutex> lock(buffered_mutex_);
  if (!buffered_.is_open()) buffered_ = Descriptor(open_again(0));
  if (!buffered_.is_open()) throw IoError(errno, "open", path_);
  forbid_readahead();
  return buffered_.fd();
}

int64_t File::nbytes() const {
  const off_t end = ::lseek(any_fd(), 0, SEEK_END);
  if (end < 0) throw IoError(errno, "lseek", path_);
  return end;
}

void File::preallocate(int64_t nbytes) {
  if (nbytes <= 0) return;
  int code;
  do {
    code = ::fallocate(any_fd(), 0, 0, nbytes) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code == EOPNOTSUPP || code == ENOSYS || code == ENODEV) {
    code = this->nbytes() < nbytes && ::ftruncate(any_fd(), nbytes) != 0 ? errno : 0;
  }
  if (code != 0) throw IoError(IoFailure{code, "fallocate", path_, 0, nbytes, 0});
}

void File::sync() {
  if (::fdatasync(any_fd()) != 0) throw IoError(errno, "fdatasync", path_);
}

}  // namespace offload
