// Sums of squares. The square of a float32 is exact as a double, and a sum of them cannot overflow one: the
// sum is finite exactly if all elements are.
#pragma once

#include <cstring>

#include "column_groups.h"
#include "kernels.h"

namespace offload {
namespace {

template <class V>
inline void add_squares_group(typename V::Wide* sums, const Column& column, std::int64_t index) {
  constexpr int kGroup = kSquareLanes / V::kWidth;
  typename V::Reg regs[kGroup];
  load_group<V>(regs, column, index);
#pragma GCC unroll 32
  for (int i = 0; i < kGroup; ++i) V::add_squares(sums + i * V::kWidePerReg, regs[i]);
}

template <class V>
void add_squares(const Column& shared_column, std::int64_t numel, double (&lanes)[kSquareLanes]) {
  const Column column = shared_column;
  constexpr int kSums = kSquareLanes / V::kWidth * V::kWidePerReg;
  typename V::Wide sums[kSums] = {};
  std::int64_t index = 0;
  for (; numel - index >= kSquareLanes; index += kSquareLanes) add_squares_group<V>(sums, column, index);
  if (index < numel) {
    unsigned char padded[kSquareLanes * sizeof(float)] = {};
    const std::int64_t size = nbytes_of(column.dtype);
    std::memcpy(padded, pointer_at<char>(column, index * size),
                static_cast<std::size_t>((numel - index) * size));
    add_squares_group<V>(sums, {reinterpret_cast<std::uintptr_t>(padded), column.dtype}, 0);
  }
  static_assert(sizeof(sums) == sizeof(lanes));
  std::memcpy(lanes, sums, sizeof(lanes));
}

}  // namespace
}  // namespace offload
