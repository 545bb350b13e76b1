// What every element of one step shares.
#pragma once

#include <cstdint>

#include "adam.h"

namespace offload {

struct AdamScalars {
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float denominator_scale;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;    // -lr / (1 - beta1^step)
  float grad_decay;   // weight decay as part of the gradient; 0 for none
  float param_decay;  // -lr * weight decay for AdamW; 0 for none
};

// Depends on the step number alone, not on the calls before, so that a resumed run goes on with the same
// bits.
AdamScalars adam_scalars(const AdamOptions& options, std::int64_t step);

// Throws std::invalid_argument for hyper-parameters or a step number out of range.
void check_adam_options(const AdamOptions& options, std::int64_t step);

void check_adam_buffers(const AdamBuffers& buffers, int num_threads);

}  // namespace offload
