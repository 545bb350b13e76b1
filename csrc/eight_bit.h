// Adam moments in 8 bits, after Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise
// Quantization", 2021: each block of 128 elements has a float32 scale, its largest magnitude, and one code
// per element on a non-linear scale.
//
//   exp_avg     =  scale * (code / 127)^4 with the sign of the code       code in [-127, 127]
//   exp_avg_sq  =  scale * (code / 255)^4                                 code in [0, 255]
//
// Where the paper looks codes up in a table, the fourth power is computed: it spaces them about as that
// "dynamic" table does, over more than eight decades, and takes a root instead of a search. A step rounds up
// or down at random, in proportion, so that the expected moment is exact: to nearest, exp_avg_sq would stand
// still, because beta2 moves it by far less than half a code. The random number is a hash of the value and
// the step, so the result depends on the block and the step alone. A variance above 0 never gets code 0, by
// whose root the step would divide.
//
// A block of which an element is not finite reads as NaN. Magnitudes below the smallest normal float are 0.
#pragma once

#include <cstdint>

#include "adam.h"

namespace offload {

constexpr std::int64_t kMomentBlock = 128;

struct EightBitBuffers {
  std::uintptr_t param16;   // bfloat16, with the residual: the split format
  std::uintptr_t residual;  // int16
  std::uintptr_t grad;
  Dtype grad_dtype;
  float grad_scale;                  // multiplies each gradient, once that is a float32
  std::uintptr_t exp_avg8;           // int8
  std::uintptr_t exp_avg8_scale;     // float32, one for each block that the range begins, as below
  std::uintptr_t exp_avg_sq8;        // uint8
  std::uintptr_t exp_avg_sq8_scale;  // float32
  std::int64_t numel;
};

// The range starts at a block. Throws std::invalid_argument before anything is written.
void adam_step_8bit(const AdamOptions& options, std::int64_t step, const EightBitBuffers& buffers,
                    int num_threads, Isa isa);

// One moment between float32 and 8 bits, rounded to nearest; `is_signed` is exp_avg's form.
void encode_8bit(std::uintptr_t values, std::uintptr_t codes, std::uintptr_t scales, std::int64_t numel,
                 bool is_signed, int num_threads, Isa isa);
void decode_8bit(std::uintptr_t codes, std::uintptr_t scales, std::uintptr_t values, std::int64_t numel,
                 bool is_signed, int num_threads, Isa isa);

}  // namespace offload
