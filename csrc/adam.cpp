#include "adam.h"

#include <cmath>
#include <string>

#include "adam_scalars.h"
#include "columns.h"
#include "kernels.h"
#include "require.h"

namespace offload {
namespace {

constexpr const char* kWho = "adam";

Columns columns_of(const AdamBuffers& buffers) {
  return {{{buffers.param, buffers.param_dtype},
           {0, Dtype::kInt16},
           {buffers.grad, buffers.grad_dtype},
           {buffers.exp_avg, buffers.state_dtype},
           {buffers.exp_avg_sq, buffers.state_dtype},
           {buffers.param_out, buffers.param_out_dtype}},
          buffers.numel,
          buffers.grad_scale};
}

}  // namespace

AdamScalars adam_scalars(const AdamOptions& options, std::int64_t step) {
  const double beta1 = options.beta1, beta2 = options.beta2, lr = options.lr;
  const double exponent = static_cast<double>(step);
  const double bias1 = options.bias_correction ? 1 - std::pow(beta1, exponent) : 1;
  const double bias2 = options.bias_correction ? 1 - std::pow(beta2, exponent) : 1;
  AdamScalars scalars{};
  scalars.beta1 = options.beta1;
  scalars.one_minus_beta1 = static_cast<float>(1 - beta1);
  scalars.beta2 = options.beta2;
  scalars.one_minus_beta2 = static_cast<float>(1 - beta2);
  scalars.denominator_scale = static_cast<float>(1 / std::sqrt(bias2));
  scalars.eps = options.eps;
  scalars.step_size = static_cast<float>(-lr / bias1);
  scalars.grad_decay = options.decoupled_weight_decay ? 0 : options.weight_decay;
  scalars.param_decay = options.decoupled_weight_decay ? static_cast<float>(-lr * options.weight_decay) : 0;
  return scalars;
}

void check_adam_options(const AdamOptions& options, std::int64_t step) {
  require(std::isfinite(options.lr), kWho, "lr must be finite, got " + std::to_string(options.lr));
  require(options.beta1 >= 0 && options.beta1 < 1, kWho,
          "beta1 must lie in [0, 1) as a float32, got " + std::to_string(options.beta1));
  require(options.beta2 >= 0 && options.beta2 < 1, kWho,
          "beta2 must lie in [0, 1) as a float32, got " + std::to_string(options.beta2));
  require(std::isfinite(options.eps) && options.eps >= 0, kWho,
          "eps must be finite and not negative, got " + std::to_string(options.eps));
  require(std::isfinite(options.weight_decay) && options.weight_decay >= 0, kWho,
          "weight_decay must be finite and not negative, got " + std::to_string(options.weight_decay));
  require(step >= 1, kWho, "step counts from 1, got " + std::to_string(step));
}

void check_adam_buffers(const AdamBuffers& buffers, int num_threads) {
  const Columns columns = columns_of(buffers);
  check_columns(kWho, columns, num_threads);
  require((buffers.exp_avg && buffers.exp_avg_sq) || buffers.numel == 0, kWho,
          "null address for moments of " + std::to_string(buffers.numel) + " elements");
  check_dtypes(kWho, columns);
}

void adam_step(const AdamOptions& options, std::int64_t step, const AdamBuffers& buffers, int num_threads,
               Isa isa) {
  check_adam_options(options, step);
  check_adam_buffers(buffers, num_threads);
  const Kernels& kernels = kernels_for(isa);
  const AdamScalars scalars = adam_scalars(options, step);
  for_each_slice(columns_of(buffers), num_threads,
                 [&](const Columns& slice) { kernels.adam(scalars, slice); });
}

}  // namespace offload
