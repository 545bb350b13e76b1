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

}  // namespace
}  // namespace offload
