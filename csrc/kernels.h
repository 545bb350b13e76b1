// What is compiled once per instruction set.
#pragma once

#include "adam_scalars.h"
#include "columns.h"

namespace offload {

// Sums of squares are kept in this many lanes, element i in lane i mod kSquareLanes, so that every
// instruction set adds up in the same order.
constexpr int kSquareLanes = 32;

struct Kernels {
  void (*adam)(const AdamScalars& scalars, const Columns& columns);
  void (*add_squares)(const Column& column, std::int64_t numel, double (&lanes)[kSquareLanes]);
};

const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace offload
