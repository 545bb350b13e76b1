#include "overlap_order.h"

#include <algorithm>

namespace offload {

bool OverlapOrder::enter(const std::shared_ptr<Transfer>& transfer) {
  for (const Extent& extent : transfer->extents_) {
    if (extent.nbytes == 0) continue;
    FileSpans& spans = files_[extent.file->identity()];
    follow_overlapping(spans, extent, transfer);
    spans.by_offset.emplace(extent.offset, Span{extent.nbytes, transfer.get()});
    spans.longest = std::max(spans.longest, extent.nbytes);
  }
  return transfer->waits_for_ == 0;
}

void OverlapOrder::follow_overlapping(const FileSpans& spans, const Extent& extent,
                                      const std::shared_ptr<Transfer>& transfer) {
  const int64_t end = extent.offset + extent.nbytes;
  auto at = spans.by_offset.upper_bound(extent.offset - spans.longest);
  for (; at != spans.by_offset.end() && at->first < end; ++at) {
    const Span& span = at->second;
    const bool overlaps = at->first + span.nbytes > extent.offset;
    const bool ordered = transfer->writing() || span.transfer->writing();
    if (!overlaps || !ordered || span.transfer == transfer.get()) continue;
    span.transfer->followers_.push_back(transfer);
    ++transfer->waits_for_;
  }
}

std::vector<std::shared_ptr<Transfer>> OverlapOrder::leave(Transfer& transfer) {
  for (const Extent& extent : transfer.extents_) {
    if (extent.nbytes != 0) remove(extent, transfer);
  }
  std::vector<std::shared_ptr<Transfer>> free;
  for (std::shared_ptr<Transfer>& follower : transfer.followers_) {
    if (--follower->waits_for_ == 0) free.push_back(std::move(follower));
  }
  transfer.followers_.clear();
  return free;
}

void OverlapOrder::remove(const Extent& extent, const Transfer& transfer) {
  const auto file = files_.find(extent.file->identity());
  auto [at, end] = file->second.by_offset.equal_range(extent.offset);
  while (at != end && at->second.transfer != &transfer) ++at;
  if (at != end) file->second.by_offset.erase(at);
  if (file->second.by_offset.empty()) files_.erase(file);
}

}  // namespace offload
