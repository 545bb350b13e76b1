#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "adam_scalars.h"
#include "columns.h"
#include "parallel.h"

namespace offload {
namespace {

void check_reversible(const AdamOptions& options, const AdamBuffers& buffers) {
  const bool all_float32 = buffers.param_dtype == Dtype::kFloat32 && buffers.grad_dtype == Dtype::kFloat32 &&
                           buffers.state_dtype == Dtype::kFloat32;
  if (!all_float32) throw std::invalid_argument("adam rollback: all buffers must be float32");
  if (options.beta1 == 0 || options.beta2 == 0) {
    throw std::invalid_argument("adam rollback: a beta of 0 keeps nothing of the moment to go back to");
  }
}

struct Element {
  float& param;
  float& exp_avg;
  float& exp_avg_sq;
};

void undo(const AdamScalars& scalars, float grad, Element at) {
  const double denominator = std::sqrt(double{at.exp_avg_sq}) * scalars.denominator_scale + scalars.eps;
  const double decayed = at.param - scalars.step_size * (at.exp_avg / denominator);
  const double param = decayed / (1 + double{scalars.param_decay});
  const double full_grad = grad + scalars.grad_decay * param;
  const double exp_avg = (at.exp_avg - scalars.one_minus_beta1 * full_grad) / scalars.beta1;
  const double exp_avg_sq = (at.exp_avg_sq - scalars.one_minus_beta2 * full_grad * full_grad) / scalars.beta2;
  at.param = static_cast<float>(param);
  at.exp_avg = static_cast<float>(exp_avg);
  // Rounding may leave a moment that was 0 a little below it, and the next step takes its root.
  at.exp_avg_sq = static_cast<float>(exp_avg_sq < 0 ? 0 : exp_avg_sq);
}

}  // namespace

void adam_rollback(const AdamOptions& options, std::int64_t step, const AdamBuffers& buffers,
                   int num_threads) {
  check_adam_options(options, step);
  check_adam_buffers(buffers, num_threads);
  check_reversible(options, buffers);
  const AdamScalars scalars = adam_scalars(options, step);
  auto* param = reinterpret_cast<float*>(buffers.param);
  const auto* grad = reinterpret_cast<const float*>(buffers.grad);
  auto* exp_avg = reinterpret_cast<float*>(buffers.exp_avg);
  auto* exp_avg_sq = reinterpret_cast<float*>(buffers.exp_avg_sq);
  parallel_for(buffers.numel, kStepGrain, num_threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      undo(scalars, grad[i] * buffers.grad_scale, {param[i], exp_avg[i], exp_avg_sq[i]});
    }
  });
}

}  // namespace offload
