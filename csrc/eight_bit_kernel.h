// The arithmetic of eight_bit.h.
#pragma once

#include <cfloat>
#include <cstring>

#include "eight_bit.h"
#include "moments.h"
#include "step_kernel.h"
#include "update_rules.h"

namespace offload {
namespace {

struct SignedCode {
  using Type = std::int8_t;
  static constexpr float kLargest = 127;
};

struct UnsignedCode {
  using Type = std::uint8_t;
  static constexpr float kLargest = 255;
};

struct ToNearest {
  template <class V, class Reg = typename V::Reg>
  Reg threshold(Reg) const {
    return V::set(0.5f);
  }
};

struct AtRandom {
  std::uint32_t seed;

  template <class V, class Reg = typename V::Reg>
  Reg threshold(Reg value) const {
    return V::hash_to_unit(value, seed);
  }
};

template <class V, class Reg = typename V::Reg>
inline Reg fourth_power(Reg value) {
  const Reg square = V::mul(value, value);
  return V::mul(square, square);
}

template <class Code>
constexpr float kLargestPower = Code::kLargest* Code::kLargest*(Code::kLargest* Code::kLargest);

template <class V, class Code>
inline void decode_block(const typename Code::Type* codes, float scale, float* values) {
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    const auto code = V::load_codes(codes + i);
    const auto share = V::mul(fourth_power<V>(code), V::set(1 / kLargestPower<Code>));
    V::store(values + i, V::xor_sign(V::mul(share, V::set(scale)), code));
  }
}

// Of elements that are all finite and not all tiny a scale that is a normal float, else 0, infinity or NaN.
template <class V>
inline float scale_of(const float* values) {
  auto largest = V::set(0);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    largest = V::larger_magnitude(largest, V::load(values + i));
  }
  const float scale = V::largest_lane(largest);
  return scale < FLT_MIN ? 0 : scale;
}

template <class V, class Code, class Rounding, class Reg = typename V::Reg>
inline Reg code_of(Reg value, float inverse_scale, Rounding rounding) {
  const Reg share = V::mul(V::magnitude(value), V::set(inverse_scale));
  const Reg root = V::mul(V::sqrt(V::sqrt(share)), V::set(Code::kLargest));
  // The root may be a rounding error off; the comparison of powers decides.
  const Reg low = V::min(V::truncate(root), V::set(Code::kLargest - 1));
  const Reg gap = V::fma(low, V::fma(low, V::fma(low, V::set(4), V::set(6)), V::set(4)), V::set(1));
  const Reg bar = V::fma(rounding.template threshold<V>(value), gap, fourth_power<V>(low));
  const Reg power = V::mul(share, V::set(kLargestPower<Code>));
  const Reg code = V::add(low, V::one_if_greater(power, bar));
  if (Code::kLargest == UnsignedCode::kLargest) return V::max(code, V::one_if_greater(value, V::set(0)));
  return V::xor_sign(code, value);
}

template <class V, class Code, class Rounding>
inline void encode_block(const float* values, float scale, Rounding rounding, typename Code::Type* codes) {
  if (!(scale > 0 && scale <= FLT_MAX)) {
    std::memset(codes, 0, kMomentBlock);
    return;
  }
  // Four float steps above: no rounding error, and no random number, takes the largest element's code from
  // it.
  const float inverse_scale = 1 / scale * (1 + 4 * FLT_EPSILON);
  for (int i = 0; i < kMomentBlock; i += V::kWidth) {
    V::store_codes(codes + i, code_of<V, Code>(V::load(values + i), inverse_scale, rounding));
  }
}

template <class V, class Code>
inline void load_block(const Moment& moment, std::int64_t index, std::size_t count, float* values) {
  const auto* from = reinterpret_cast<const typename Code::Type*>(moment.codes) + index;
  float scale;
  std::memcpy(&scale, reinterpret_cast<const float*>(moment.scales) + index / kMomentBlock, sizeof(scale));
  if (count == kMomentBlock) return decode_block<V, Code>(from, scale, values);
  typename Code::Type padded[kMomentBlock] = {};
  std::memcpy(padded, from, count);
  decode_block<V, Code>(padded, scale, values);
}

template <class V, class Code, class Rounding>
inline void store_block(const Moment& moment, std::int64_t index, std::size_t count, const float* values,
                        float scale, Rounding rounding) {
  auto* to = reinterpret_cast<typename Code::Type*>(moment.codes) + index;
  std::memcpy(reinterpret_cast<float*>(moment.scales) + index / kMomentBlock, &scale, sizeof(scale));
  if (count == kMomentBlock) return encode_block<V, Code>(values, scale, rounding, to);
  typename Code::Type padded[kMomentBlock];
  encode_block<V, Code>(values, scale, rounding, padded);
  std::memcpy(to, padded, count);
}

inline std::int64_t block_size(std::int64_t numel, std::int64_t index) {
  return numel - index < kMomentBlock ? numel - index : kMomentBlock;
}

template <class V>
void adam_8bit(const AdamScalars& scalars, const Columns& columns, const Moments& shared_moments,
               std::uint32_t seed) {
  const Moments moments = shared_moments;
  const AtRandom rounding{seed};
  for (std::int64_t index = 0; index < columns.numel; index += kMomentBlock) {
    const std::int64_t count = block_size(columns.numel, index);
    const auto nbytes = static_cast<std::size_t>(count);
    alignas(64) float exp_avg[kMomentBlock];
    alignas(64) float exp_avg_sq[kMomentBlock];
    load_block<V, SignedCode>(moments.exp_avg, index, nbytes, exp_avg);
    load_block<V, UnsignedCode>(moments.exp_avg_sq, index, nbytes, exp_avg_sq);
    Columns block = slice(columns, index, index + count);
    block.at[kState] = {reinterpret_cast<std::uintptr_t>(exp_avg), Dtype::kFloat32};
    block.at[kSecondState] = {reinterpret_cast<std::uintptr_t>(exp_avg_sq), Dtype::kFloat32};
    update_all<V, AdamRule>(scalars, block);
    // Both before either is stored, so that one's latency hides behind the other's.
    const float exp_avg_scale = scale_of<V>(exp_avg), exp_avg_sq_scale = scale_of<V>(exp_avg_sq);
    store_block<V, SignedCode>(moments.exp_avg, index, nbytes, exp_avg, exp_avg_scale, rounding);
    store_block<V, UnsignedCode>(moments.exp_avg_sq, index, nbytes, exp_avg_sq, exp_avg_sq_scale, rounding);
  }
}

template <class V, class Code>
void encode_moment(const float* values, const Moment& moment, std::int64_t numel) {
  for (std::int64_t index = 0; index < numel; index += kMomentBlock) {
    const auto count = static_cast<std::size_t>(block_size(numel, index));
    float padded[kMomentBlock] = {};
    std::memcpy(padded, values + index, count * sizeof(float));
    store_block<V, Code>(moment, index, count, padded, scale_of<V>(padded), ToNearest{});
  }
}

template <class V, class Code>
void decode_moment(const Moment& moment, float* values, std::int64_t numel) {
  for (std::int64_t index = 0; index < numel; index += kMomentBlock) {
    const auto count = static_cast<std::size_t>(block_size(numel, index));
    float padded[kMomentBlock];
    load_block<V, Code>(moment, index, count, padded);
    std::memcpy(values + index, padded, count * sizeof(float));
  }
}

}  // namespace
}  // namespace offload
