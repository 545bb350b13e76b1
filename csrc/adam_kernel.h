// The arithmetic of a step; each file that includes this compiles it for one instruction set.
#pragma once

#include <cstring>

#include "adam_scalars.h"
#include "simd_portable.h"

namespace offload {
namespace {

template <class V, class Reg = typename V::Reg>
inline void adam_update(const AdamScalars& scalars, Reg grad, Reg& param, Reg& exp_avg, Reg& exp_avg_sq) {
  if (scalars.grad_decay != 0) grad = V::fma(param, V::set(scalars.grad_decay), grad);
  exp_avg = V::fma(grad, V::set(scalars.one_minus_beta1), V::mul(exp_avg, V::set(scalars.beta1)));
  const Reg square = V::mul(grad, grad);
  exp_avg_sq = V::fma(square, V::set(scalars.one_minus_beta2), V::mul(exp_avg_sq, V::set(scalars.beta2)));
  const Reg root = V::sqrt(exp_avg_sq);
  const Reg denominator = V::fma(root, V::set(scalars.denominator_scale), V::set(scalars.eps));
  if (scalars.param_decay != 0) param = V::fma(param, V::set(scalars.param_decay), param);
  param = V::fma(V::div(exp_avg, denominator), V::set(scalars.step_size), param);
}

template <class V, int kGroup, class T>
inline void load_group(typename V::Reg (&regs)[kGroup], const T* from) {
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; ++i) regs[i] = V::load(from + i * V::kWidth);
}

template <class V, int kGroup, class T>
inline void store_group(T* to, const typename V::Reg (&regs)[kGroup]) {
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; ++i) V::store(to + i * V::kWidth, regs[i]);
}

template <class P, class G, class S>
struct AdamPointers {
  P* param;
  const G* grad;
  S* exp_avg;
  S* exp_avg_sq;
};

template <class V, int kGroup, class P, class G, class S>
inline void update_group(const AdamScalars& scalars, const AdamPointers<P, G, S>& at) {
  typename V::Reg param[kGroup], grad[kGroup], exp_avg[kGroup], exp_avg_sq[kGroup];
  load_group<V>(grad, at.grad);
  load_group<V>(exp_avg, at.exp_avg);
  load_group<V>(exp_avg_sq, at.exp_avg_sq);
  load_group<V>(param, at.param);
#pragma GCC unroll 8
  for (int i = 0; i < kGroup; ++i) adam_update<V>(scalars, grad[i], param[i], exp_avg[i], exp_avg_sq[i]);
  store_group<V>(at.param, param);
  store_group<V>(at.exp_avg, exp_avg);
  store_group<V>(at.exp_avg_sq, exp_avg_sq);
}

// Less than a vector goes through the same instructions, in a padded copy.
template <class V, class P, class G, class S>
void update_tail(const AdamScalars& scalars, const AdamPointers<P, G, S>& at, std::size_t count) {
  P param[V::kWidth] = {};
  G grad[V::kWidth] = {};
  S exp_avg[V::kWidth] = {};
  S exp_avg_sq[V::kWidth] = {};
  std::memcpy(param, at.param, count * sizeof(P));
  std::memcpy(grad, at.grad, count * sizeof(G));
  std::memcpy(exp_avg, at.exp_avg, count * sizeof(S));
  std::memcpy(exp_avg_sq, at.exp_avg_sq, count * sizeof(S));
  update_group<V, 1, P, G, S>(scalars, {param, grad, exp_avg, exp_avg_sq});
  std::memcpy(at.param, param, count * sizeof(P));
  std::memcpy(at.exp_avg, exp_avg, count * sizeof(S));
  std::memcpy(at.exp_avg_sq, exp_avg_sq, count * sizeof(S));
}

template <class V, class P, class G, class S>
void update_all(const AdamScalars& shared, const AdamBuffers& buffers) {
  const AdamScalars scalars = shared;  // a copy, which no store below can alias
  const AdamPointers<P, G, S> start{
      reinterpret_cast<P*>(buffers.param), reinterpret_cast<const G*>(buffers.grad),
      reinterpret_cast<S*>(buffers.exp_avg), reinterpret_cast<S*>(buffers.exp_avg_sq)};
  const auto at = [&](std::int64_t index) {
    return AdamPointers<P, G, S>{start.param + index, start.grad + index, start.exp_avg + index,
                                 start.exp_avg_sq + index};
  };
  // Loads that go out together; measured up to a third faster than 1 where the data comes from memory.
  constexpr int kGroup = 4;
  std::int64_t index = 0;
  for (; buffers.numel - index >= kGroup * V::kWidth; index += kGroup * V::kWidth) {
    update_group<V, kGroup>(scalars, at(index));
  }
  for (; buffers.numel - index >= V::kWidth; index += V::kWidth) update_group<V, 1>(scalars, at(index));
  const std::int64_t tail = buffers.numel - index;
  if (tail != 0) update_tail<V>(scalars, at(index), static_cast<std::size_t>(tail));
}

template <class V>
AdamKernel find_kernel(const AdamBuffers& buffers) {
  constexpr Dtype f32 = Dtype::kFloat32, bf16 = Dtype::kBfloat16, f16 = Dtype::kFloat16;
  struct Entry {
    Dtype param, grad, state;
    AdamKernel kernel;
  };
  static constexpr Entry kEntries[] = {
      {f32, f32, f32, update_all<V, float, float, float>},
      {f32, bf16, f32, update_all<V, float, Bfloat16, float>},
      {f32, f16, f32, update_all<V, float, Float16, float>},
      {bf16, bf16, f32, update_all<V, Bfloat16, Bfloat16, float>},
      {bf16, bf16, bf16, update_all<V, Bfloat16, Bfloat16, Bfloat16>},
      {f16, f16, f32, update_all<V, Float16, Float16, float>},
      {f16, f16, f16, update_all<V, Float16, Float16, Float16>},
  };
  for (const Entry& entry : kEntries) {
    if (entry.param == buffers.param_dtype && entry.grad == buffers.grad_dtype &&
        entry.state == buffers.state_dtype) {
      return entry.kernel;
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace offload
