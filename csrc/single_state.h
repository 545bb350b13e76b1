// One step of the optimizers that keep one state per parameter, or none. As with Adam, the bits are the same
// however the range is cut, whatever the number of threads and the instruction set.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace offload {

// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, in the form of DeepSpeedCPULion: where
// the blend of momentum and gradient is 0, its sign bit counts, so that +0 moves the parameter by -lr.
struct LionOptions {
  float lr;
  float beta1;
  float beta2;
  float weight_decay;  // decoupled
};

// torch.optim.Adagrad; the state starts as its initial_accumulator_value.
struct AdagradOptions {
  float lr;
  float eps;
  float weight_decay;  // part of the gradient
  float lr_decay;
};

// torch.optim.SGD: the first step makes the gradient the momentum, whatever the buffer held.
struct SgdOptions {
  float lr;
  float momentum;
  double dampening;    // torch rounds 1 - dampening, not dampening
  float weight_decay;  // part of the gradient
  bool nesterov;
};

struct SingleStateBuffers {
  std::uintptr_t param;     // of param_dtype, or bfloat16 where there is a residual
  std::uintptr_t residual;  // the rest of a parameter in the split format; 0 for none
  std::uintptr_t grad;
  std::uintptr_t state;  // 0 for none, which only SGD without momentum allows
  std::int64_t numel;
  Dtype param_dtype;
  Dtype grad_dtype;
  Dtype state_dtype;
  float grad_scale;          // multiplies each gradient, once that is a float32
  std::uintptr_t param_out;  // receives a copy of the new parameter; 0 for none
  Dtype param_out_dtype;
};

// `step` counts from 1 and includes this step. All throw std::invalid_argument before anything is written.
void lion_step(const LionOptions& options, std::int64_t step, const SingleStateBuffers& buffers,
               int num_threads, Isa isa);
void adagrad_step(const AdagradOptions& options, std::int64_t step, const SingleStateBuffers& buffers,
                  int num_threads, Isa isa);
void sgd_step(const SgdOptions& options, std::int64_t step, const SingleStateBuffers& buffers,
              int num_threads, Isa isa);

}  // namespace offload
