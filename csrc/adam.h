// One Adam or AdamW step over plain memory. What happens to an element depends on that element alone: the
// bits are the same however the range is cut, whatever the number of threads and the instruction set.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace offload {

struct AdamOptions {
  float lr;
  float beta1;
  float beta2;
  float eps;
  float weight_decay;
  bool decoupled_weight_decay;  // AdamW; otherwise the decay is part of the gradient
  bool bias_correction;
};

struct AdamBuffers {
  std::uintptr_t param;
  std::uintptr_t grad;
  std::uintptr_t exp_avg;
  std::uintptr_t exp_avg_sq;
  std::int64_t numel;
  Dtype param_dtype;
  Dtype grad_dtype;
  Dtype state_dtype;
  float grad_scale;          // multiplies each gradient, once that is a float32
  std::uintptr_t param_out;  // receives a copy of the new parameter; 0 for none
  Dtype param_out_dtype;     // rounded to nearest even; any NaN becomes one quiet NaN where this is 16-bit
};

// `step` counts from 1 and includes this step. Throws std::invalid_argument before anything is written.
void adam_step(const AdamOptions& options, std::int64_t step, const AdamBuffers& buffers, int num_threads,
               Isa isa);

// Undoes adam_step(step) within float32 rounding; float32 buffers only, betas above 0.
void adam_rollback(const AdamOptions& options, std::int64_t step, const AdamBuffers& buffers,
                   int num_threads);

}  // namespace offload
