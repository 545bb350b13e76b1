// Loads and stores of a group of vectors, whatever type a column has: one well-predicted branch per group,
// and no kernel for every combination of types.
#pragma once

#include "columns.h"
#include "simd_portable.h"

namespace offload {
namespace {

template <class T>
inline T* pointer_at(const Column& column, std::int64_t index) {
  return reinterpret_cast<T*>(column.address) + index;
}

template <class V, int kGroup, class T>
inline void load_typed(typename V::Reg (&regs)[kGroup], const T* from) {
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; ++i) regs[i] = V::load(from + i * V::kWidth);
}

template <class V, int kGroup, class T>
inline void store_typed(T* to, const typename V::Reg (&regs)[kGroup]) {
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; ++i) V::store(to + i * V::kWidth, regs[i]);
}

template <class V, int kGroup>
inline void load_group(typename V::Reg (&regs)[kGroup], const Column& column, std::int64_t index) {
  if (!column.address) {
    for (auto& reg : regs) reg = V::set(0);
  } else if (column.dtype == Dtype::kFloat32) {
    load_typed<V>(regs, pointer_at<const float>(column, index));
  } else if (column.dtype == Dtype::kBfloat16) {
    load_typed<V>(regs, pointer_at<const Bfloat16>(column, index));
  } else {
    load_typed<V>(regs, pointer_at<const Float16>(column, index));
  }
}

template <class V, int kGroup>
inline void store_group(const Column& column, std::int64_t index, const typename V::Reg (&regs)[kGroup]) {
  if (!column.address) return;
  if (column.dtype == Dtype::kFloat32) return store_typed<V>(pointer_at<float>(column, index), regs);
  if (column.dtype == Dtype::kBfloat16) return store_typed<V>(pointer_at<Bfloat16>(column, index), regs);
  store_typed<V>(pointer_at<Float16>(column, index), regs);
}

template <class V, int kGroup>
inline void load_split(typename V::Reg (&regs)[kGroup], const Column& upper, const Column& residual,
                       std::int64_t index) {
  const auto* from = pointer_at<const Bfloat16>(upper, index);
  const auto* rest = pointer_at<const std::int16_t>(residual, index);
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; ++i) regs[i] = V::load_split(from + i * V::kWidth, rest + i * V::kWidth);
}

template <class V, int kGroup>
inline void store_split(const Column& upper, const Column& residual, std::int64_t index,
                        const typename V::Reg (&regs)[kGroup]) {
  auto* to = pointer_at<Bfloat16>(upper, index);
  auto* rest = pointer_at<std::int16_t>(residual, index);
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; ++i) V::store_split(to + i * V::kWidth, rest + i * V::kWidth, regs[i]);
}

template <class V, int kGroup>
inline void load_param(typename V::Reg (&regs)[kGroup], const Columns& columns, std::int64_t index) {
  const Column& residual = columns.at[kResidual];
  if (residual.address) return load_split<V>(regs, columns.at[kParam], residual, index);
  load_group<V>(regs, columns.at[kParam], index);
}

template <class V, int kGroup>
inline void store_param(const Columns& columns, std::int64_t index, const typename V::Reg (&regs)[kGroup]) {
  const Column& residual = columns.at[kResidual];
  if (residual.address) return store_split<V>(columns.at[kParam], residual, index, regs);
  store_group<V>(columns.at[kParam], index, regs);
}

}  // namespace
}  // namespace offload
