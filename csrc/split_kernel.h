// Between float32 weights and the split format of split.h.
#pragma once

#include "column_groups.h"

namespace offload {
namespace {

template <class V>
inline void encode_range(const Column& master, const Columns& split, std::int64_t begin, std::int64_t end) {
  for (std::int64_t index = begin; index < end; index += V::kWidth) {
    typename V::Reg regs[1];
    load_group<V>(regs, master, index);
    store_split<V>(split.at[kParam], split.at[kResidual], index, regs);
  }
}

template <class V>
inline void decode_range(const Columns& split, const Column& master, std::int64_t begin, std::int64_t end) {
  for (std::int64_t index = begin; index < end; index += V::kWidth) {
    typename V::Reg regs[1];
    load_split<V>(regs, split.at[kParam], split.at[kResidual], index);
    store_group<V>(master, index, regs);
  }
}

template <class V>
void split_encode(const Column& shared_master, const Columns& shared_split) {
  const Column master = shared_master;
  const Columns split = shared_split;
  const std::int64_t vectors_end = split.numel / V::kWidth * V::kWidth;
  encode_range<V>(master, split, 0, vectors_end);
  encode_range<Portable>(master, split, vectors_end, split.numel);
}

template <class V>
void split_decode(const Columns& shared_split, const Column& shared_master) {
  const Column master = shared_master;
  const Columns split = shared_split;
  const std::int64_t vectors_end = split.numel / V::kWidth * V::kWidth;
  decode_range<V>(split, master, 0, vectors_end);
  decode_range<Portable>(split, master, vectors_end, split.numel);
}

}  // namespace
}  // namespace offload
