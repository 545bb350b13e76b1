// Transfers of one handle that touch the same bytes, at least one of them writing, run in the order of
// submission.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transfer.h"

namespace offload {

class OverlapOrder {
 public:
  // Whether the transfer may start now; if not, `leave` of the last one before it hands it out.
  bool enter(const std::shared_ptr<Transfer>& transfer);
  // To be called before the transfer finishes; gives those that waited for nothing else.
  std::vector<std::shared_ptr<Transfer>> leave(Transfer& transfer);

 private:
  struct Span {
    int64_t nbytes;
    Transfer* transfer;
  };
  struct FileSpans {
    std::multimap<int64_t, Span> by_offset;
    int64_t longest = 0;
  };
  struct IdentityHash {
    size_t operator()(const FileIdentity& identity) const {
      return std::hash<uint64_t>()(identity.inode) ^ (std::hash<uint64_t>()(identity.device) << 1);
    }
  };

  static void follow_overlapping(const FileSpans& spans, const Extent& extent,
                                 const std::shared_ptr<Transfer>& transfer);
  void remove(const Extent& extent, const Transfer& transfer);

  std::unordered_map<FileIdentity, FileSpans, IdentityHash> files_;
};

}  // namespace offload
