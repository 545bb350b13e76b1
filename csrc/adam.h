// One Adam or AdamW step over plain memory. What happens to an element depends on that element alone: the
// bits are the same however the range is cut, whatever the number of threads and the instruction set.
#pragma once

#include <cstdint>
#include <vector>

namespace offload {

enum class Dtype { kFloat32, kBfloat16, kFloat16 };
enum class Isa { kPortable, kAvx2, kAvx512 };

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
};

// What this CPU can run, slowest first.
std::vector<Isa> supported_isas();

// `step` counts from 1 and includes this step. Throws std::invalid_argument before anything is written.
void adam_step(const AdamOptions& options, std::int64_t step, const AdamBuffers& buffers, int num_threads,
               Isa isa);

// Undoes adam_step(step) within float32 rounding; float32 buffers only, betas above 0.
void adam_rollback(const AdamOptions& options, std::int64_t step, const AdamBuffers& buffers,
                   int num_threads);

}  // namespace offload
