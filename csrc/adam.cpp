#include "adam.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "adam_scalars.h"
#include "parallel.h"

namespace offload {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("adam: " + what);
}

void check_options(const AdamOptions& options) {
  require(std::isfinite(options.lr), "lr must be finite, got " + std::to_string(options.lr));
  require(options.beta1 >= 0 && options.beta1 < 1,
          "beta1 must lie in [0, 1) as a float32, got " + std::to_string(options.beta1));
  require(options.beta2 >= 0 && options.beta2 < 1,
          "beta2 must lie in [0, 1) as a float32, got " + std::to_string(options.beta2));
  require(std::isfinite(options.eps) && options.eps >= 0,
          "eps must be finite and not negative, got " + std::to_string(options.eps));
  require(std::isfinite(options.weight_decay) && options.weight_decay >= 0,
          "weight_decay must be finite and not negative, got " + std::to_string(options.weight_decay));
}

bool supports(Isa isa) {
#if defined(__x86_64__)
  // Every CPU with AVX2 and FMA has F16C, which not every compiler can ask for by name.
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::kAvx512) return __builtin_cpu_supports("avx512f");
#endif
  return isa == Isa::kPortable;
}

AdamKernel find_kernel(const AdamBuffers& buffers, Isa isa) {
  require(supports(isa), "this CPU lacks the instruction set asked for; see supported_isas()");
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return adam_kernel_avx2(buffers);
  if (isa == Isa::kAvx512) return adam_kernel_avx512(buffers);
#endif
  return adam_kernel_portable(buffers);
}

std::uintptr_t nbytes(Dtype dtype, std::int64_t numel) {
  return static_cast<std::uintptr_t>(numel) * (dtype == Dtype::kFloat32 ? 4 : 2);
}

AdamBuffers slice(const AdamBuffers& buffers, std::int64_t begin, std::int64_t end) {
  AdamBuffers part = buffers;
  part.param += nbytes(buffers.param_dtype, begin);
  part.grad += nbytes(buffers.grad_dtype, begin);
  part.exp_avg += nbytes(buffers.state_dtype, begin);
  part.exp_avg_sq += nbytes(buffers.state_dtype, begin);
  part.numel = end - begin;
  return part;
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

void check_adam_arguments(const AdamOptions& options, std::int64_t step, const AdamBuffers& buffers,
                          int num_threads) {
  check_options(options);
  require(step >= 1, "step counts from 1, got " + std::to_string(step));
  require(num_threads >= 1, "num_threads must be at least 1, got " + std::to_string(num_threads));
  require(buffers.numel >= 0, "numel must not be negative, got " + std::to_string(buffers.numel));
  const bool all_given = buffers.param && buffers.grad && buffers.exp_avg && buffers.exp_avg_sq;
  require(all_given || buffers.numel == 0,
          "null address for a buffer of " + std::to_string(buffers.numel) + " elements");
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (supports(isa)) isas.push_back(isa);
  }
  return isas;
}

void adam_step(const AdamOptions& options, std::int64_t step, const AdamBuffers& buffers, int num_threads,
               Isa isa) {
  check_adam_arguments(options, step, buffers, num_threads);
  const AdamKernel kernel = find_kernel(buffers, isa);
  require(kernel != nullptr,
          "no kernel for these dtypes: gradients share the parameters' dtype (float32 parameters also take "
          "16-bit "
          "gradients), moments are float32 or share it");
  const AdamScalars scalars = adam_scalars(options, step);
  parallel_for(buffers.numel, kAdamGrain, num_threads,
               [&](std::int64_t begin, std::int64_t end) { kernel(scalars, slice(buffers, begin, end)); });
}

}  // namespace offload
