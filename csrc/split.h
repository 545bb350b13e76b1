// The split format: a float32 weight as a bfloat16 parameter and 16 bits that the parameter lacks.
//
//   parameter = (bits + 0x8000) >> 16          residual = the lower 16 bits, read as a signed number
//   bits = (parameter << 16) + residual
//
// The parameter is the weight rounded to nearest, ties away from zero: only so is the residual of a tie,
// -32768, one that 16 bits hold. (torch rounds ties to even; of 65536 weights one is a tie.) The largest
// floats round to an infinite parameter and still come back exactly. A NaN becomes the quiet NaN of its sign,
// residual 0. Every other bit pattern, both zeros, subnormals and infinities included, is kept as it is.
#pragma once

#include <cstdint>

#include "adam.h"

namespace offload {

struct SplitBuffers {
  std::uintptr_t param16;   // bfloat16
  std::uintptr_t residual;  // int16
  std::uintptr_t grad;
  std::uintptr_t exp_avg;     // float32
  std::uintptr_t exp_avg_sq;  // float32
  std::int64_t numel;
  Dtype grad_dtype;
  float grad_scale;  // multiplies each gradient, once that is a float32
};

// The bits of adam_step() on the float32 weight.
void adam_step_split(const AdamOptions& options, std::int64_t step, const SplitBuffers& buffers,
                     int num_threads, Isa isa);

void split_encode(std::uintptr_t master, std::uintptr_t param16, std::uintptr_t residual, std::int64_t numel,
                  int num_threads, Isa isa);

void split_decode(std::uintptr_t param16, std::uintptr_t residual, std::uintptr_t master, std::int64_t numel,
                  int num_threads, Isa isa);

}  // namespace offload
