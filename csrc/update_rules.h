// The arithmetic of one element, for each optimizer. A rule has kStates states and update().
#pragma once

#include "adam_scalars.h"
#include "single_state_scalars.h"

namespace offload {
namespace {

struct AdamRule {
  using Scalars = AdamScalars;
  static constexpr int kStates = 2;

  template <class V, class Reg = typename V::Reg>
  static void update(const Scalars& scalars, Reg grad, Reg& param, Reg (&state)[kStates]) {
    Reg& exp_avg = state[0];
    Reg& exp_avg_sq = state[1];
    if (scalars.grad_decay != 0) grad = V::fma(param, V::set(scalars.grad_decay), grad);
    exp_avg = V::fma(grad, V::set(scalars.one_minus_beta1), V::mul(exp_avg, V::set(scalars.beta1)));
    const Reg square = V::mul(grad, grad);
    exp_avg_sq = V::fma(square, V::set(scalars.one_minus_beta2), V::mul(exp_avg_sq, V::set(scalars.beta2)));
    const Reg root = V::sqrt(exp_avg_sq);
    const Reg denominator = V::fma(root, V::set(scalars.denominator_scale), V::set(scalars.eps));
    if (scalars.param_decay != 0) param = V::fma(param, V::set(scalars.param_decay), param);
    param = V::fma(V::div(exp_avg, denominator), V::set(scalars.step_size), param);
  }
};

struct LionRule {
  using Scalars = LionScalars;
  static constexpr int kStates = 1;

  template <class V, class Reg = typename V::Reg>
  static void update(const Scalars& scalars, Reg grad, Reg& param, Reg (&state)[kStates]) {
    Reg& exp_avg = state[0];
    const Reg blend = V::fma(grad, V::set(scalars.one_minus_beta1), V::mul(exp_avg, V::set(scalars.beta1)));
    param = V::fma(param, V::set(scalars.param_scale), V::xor_sign(V::set(scalars.step_size), blend));
    exp_avg = V::fma(grad, V::set(scalars.one_minus_beta2), V::mul(exp_avg, V::set(scalars.beta2)));
  }
};

struct AdagradRule {
  using Scalars = AdagradScalars;
  static constexpr int kStates = 1;

  template <class V, class Reg = typename V::Reg>
  static void update(const Scalars& scalars, Reg grad, Reg& param, Reg (&state)[kStates]) {
    Reg& sum = state[0];
    if (scalars.grad_decay != 0) grad = V::fma(param, V::set(scalars.grad_decay), grad);
    sum = V::fma(grad, grad, sum);
    const Reg denominator = V::add(V::sqrt(sum), V::set(scalars.eps));
    param = V::fma(V::div(grad, denominator), V::set(scalars.step_size), param);
  }
};

struct SgdRule {
  using Scalars = SgdScalars;
  static constexpr int kStates = 1;

  template <class V, class Reg = typename V::Reg>
  static void update(const Scalars& scalars, Reg grad, Reg& param, Reg (&state)[kStates]) {
    Reg& momentum = state[0];
    if (scalars.grad_decay != 0) grad = V::fma(param, V::set(scalars.grad_decay), grad);
    if (scalars.starts_momentum) {
      momentum = grad;
    } else {
      momentum = V::fma(grad, V::set(scalars.grad_share), V::mul(momentum, V::set(scalars.momentum)));
    }
    Reg direction = momentum;
    if (scalars.nesterov) direction = V::fma(momentum, V::set(scalars.momentum), grad);
    param = V::fma(direction, V::set(scalars.step_size), param);
  }
};

}  // namespace
}  // namespace offload
