// The one place where an error of the kernel gets its facts: call, path, offset, sizes, errno.
#pragma once

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace offload {

struct IoFailure {
  int code = 0;
  std::string call;
  std::string path;
  int64_t offset = 0;
  int64_t nbytes_wanted = 0;
  int64_t nbytes_moved = 0;
};

class IoError : public std::runtime_error {
 public:
  explicit IoError(IoFailure failure)
      : std::runtime_error(failure.call + ": " + std::generic_category().message(failure.code)),
        failure_(std::move(failure)) {}
  IoError(int code, std::string call, std::string path = "")
      : IoError(IoFailure{code, std::move(call), std::move(path), 0, 0, 0}) {}

  const IoFailure& failure() const noexcept { return failure_; }
  int code() const noexcept { return failure_.code; }

 private:
  IoFailure failure_;
};

}  // namespace offload
