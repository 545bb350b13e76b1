// What every element of one step shares, and the kernels that use it.
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

void check_adam_arguments(const AdamOptions& options, std::int64_t step, const AdamBuffers& buffers,
                          int num_threads);

// Elements per piece of work: below this, starting a thread was measured to cost more than it saves.
constexpr std::int64_t kAdamGrain = 1 << 18;

using AdamKernel = void (*)(const AdamScalars& scalars, const AdamBuffers& buffers);

// nullptr for a combination of dtypes that has no kernel.
AdamKernel adam_kernel_portable(const AdamBuffers& buffers);
AdamKernel adam_kernel_avx2(const AdamBuffers& buffers);
AdamKernel adam_kernel_avx512(const AdamBuffers& buffers);

}  // namespace offload
