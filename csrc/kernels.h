// What is compiled once per instruction set.
#pragma once

#include "adam_scalars.h"
#include "columns.h"
#include "moments.h"
#include "single_state_scalars.h"

namespace offload {

// Sums of squares are kept in this many lanes, element i in lane i mod kSquareLanes, so that every
// instruction set adds up in the same order.
constexpr int kSquareLanes = 32;

struct Kernels {
  void (*adam)(const AdamScalars& scalars, const Columns& columns);
  void (*lion)(const LionScalars& scalars, const Columns& columns);
  void (*adagrad)(const AdagradScalars& scalars, const Columns& columns);
  void (*sgd)(const SgdScalars& scalars, const Columns& columns);
  void (*split_encode)(const Column& master, const Columns& split);
  void (*split_decode)(const Columns& split, const Column& master);
  void (*adam_8bit)(const AdamScalars& scalars, const Columns& columns, const Moments& moments,
                    std::uint32_t seed);
  void (*encode_signed)(const float* values, const Moment& moment, std::int64_t numel);
  void (*encode_unsigned)(const float* values, const Moment& moment, std::int64_t numel);
  void (*decode_signed)(const Moment& moment, float* values, std::int64_t numel);
  void (*decode_unsigned)(const Moment& moment, float* values, std::int64_t numel);
  void (*add_squares)(const Column& column, std::int64_t numel, double (&lanes)[kSquareLanes]);
};

const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace offload
