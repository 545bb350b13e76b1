#include "single_state.h"

#include <cmath>
#include <string>

#include "columns.h"
#include "kernels.h"
#include "require.h"

namespace offload {
namespace {

Columns columns_of(const SingleStateBuffers& buffers) {
  return {{{buffers.param, buffers.residual ? Dtype::kBfloat16 : buffers.param_dtype},
           {buffers.residual, Dtype::kInt16},
           {buffers.grad, buffers.grad_dtype},
           {buffers.state, buffers.state_dtype},
           {0, Dtype::kFloat32},
           {buffers.param_out, buffers.param_out_dtype}},
          buffers.numel,
          buffers.grad_scale};
}

void check_not_negative(const char* who, const char* name, float value) {
  require(std::isfinite(value) && value >= 0, who,
          std::string(name) + " must be finite and not negative, got " + std::to_string(value));
}

void check_beta(const char* who, const char* name, float value) {
  require(value >= 0 && value < 1, who,
          std::string(name) + " must lie in [0, 1) as a float32, got " + std::to_string(value));
}

void check_call(const char* who, float lr, std::int64_t step, const SingleStateBuffers& buffers,
                int num_threads) {
  require(std::isfinite(lr), who, "lr must be finite, got " + std::to_string(lr));
  require(step >= 1, who, "step counts from 1, got " + std::to_string(step));
  const Columns columns = columns_of(buffers);
  check_columns(who, columns, num_threads);
  check_dtypes(who, columns);
}

void check_state(const char* who, const SingleStateBuffers& buffers) {
  require(buffers.state || buffers.numel == 0, who,
          "null address for a state of " + std::to_string(buffers.numel) + " elements");
}

}  // namespace

void lion_step(const LionOptions& options, std::int64_t step, const SingleStateBuffers& buffers,
               int num_threads, Isa isa) {
  constexpr const char* kWho = "lion";
  check_call(kWho, options.lr, step, buffers, num_threads);
  check_state(kWho, buffers);
  check_beta(kWho, "beta1", options.beta1);
  check_beta(kWho, "beta2", options.beta2);
  check_not_negative(kWho, "weight_decay", options.weight_decay);
  LionScalars scalars{};
  scalars.beta1 = options.beta1;
  scalars.one_minus_beta1 = 1 - options.beta1;
  scalars.beta2 = options.beta2;
  scalars.one_minus_beta2 = 1 - options.beta2;
  scalars.step_size = -options.lr;
  // In float32, as DeepSpeedCPULion has it, so that both end with the same bits.
  const float decay = options.lr * options.weight_decay;
  scalars.param_scale = 1 - decay;
  const Kernels& kernels = kernels_for(isa);
  for_each_slice(columns_of(buffers), num_threads,
                 [&](const Columns& slice) { kernels.lion(scalars, slice); });
}

void adagrad_step(const AdagradOptions& options, std::int64_t step, const SingleStateBuffers& buffers,
                  int num_threads, Isa isa) {
  constexpr const char* kWho = "adagrad";
  check_call(kWho, options.lr, step, buffers, num_threads);
  check_state(kWho, buffers);
  check_not_negative(kWho, "eps", options.eps);
  check_not_negative(kWho, "weight_decay", options.weight_decay);
  check_not_negative(kWho, "lr_decay", options.lr_decay);
  const double slowdown = 1 + static_cast<double>(step - 1) * options.lr_decay;
  AdagradScalars scalars{};
  scalars.eps = options.eps;
  scalars.step_size = static_cast<float>(-options.lr / slowdown);
  scalars.grad_decay = options.weight_decay;
  const Kernels& kernels = kernels_for(isa);
  for_each_slice(columns_of(buffers), num_threads,
                 [&](const Columns& slice) { kernels.adagrad(scalars, slice); });
}

void sgd_step(const SgdOptions& options, std::int64_t step, const SingleStateBuffers& buffers,
              int num_threads, Isa isa) {
  constexpr const char* kWho = "sgd";
  check_call(kWho, options.lr, step, buffers, num_threads);
  check_not_negative(kWho, "momentum", options.momentum);
  check_not_negative(kWho, "weight_decay", options.weight_decay);
  require(std::isfinite(options.dampening), kWho,
          "dampening must be finite, got " + std::to_string(options.dampening));
  require(!options.nesterov || (options.momentum > 0 && options.dampening == 0), kWho,
          "nesterov takes a momentum above 0 and no dampening");
  const bool has_momentum = options.momentum != 0;
  if (has_momentum) check_state(kWho, buffers);
  SgdScalars scalars{};
  scalars.momentum = options.momentum;
  scalars.grad_share = static_cast<float>(1 - options.dampening);
  scalars.step_size = -options.lr;
  scalars.grad_decay = options.weight_decay;
  scalars.starts_momentum = step == 1 || !has_momentum;
  scalars.nesterov = options.nesterov;
  Columns columns = columns_of(buffers);
  if (!has_momentum) columns.at[kState].address = 0;
  const Kernels& kernels = kernels_for(isa);
  for_each_slice(columns, num_threads, [&](const Columns& slice) { kernels.sgd(scalars, slice); });
}

}  // namespace offload
