// 16-bit floats, and the one-lane "vector" for CPUs without a vector file of their own.
//
// A vector type V has kWidth lanes in a V::Reg, and the functions that Portable has. Every V gives the same
// bits: each operation rounds once, and a sum of a product is always written as fma(), so that no compiler
// may fuse, or not fuse, on its own. V::Wide holds doubles, kWidePerReg of them the lanes of a Reg.
//
// xor_sign(a, b) is a, negated where the sign bit of b is set. larger_magnitude() compares bits, so a NaN
// wins. hash_to_unit() is a number in [0, 1) that looks random. load_split(), store_split(): see split.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace offload {

struct Bfloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

namespace {

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float to_float(float value) { return value; }

inline float to_float(Bfloat16 value) { return bit_cast<float>(std::uint32_t{value.bits} << 16); }

inline float to_float(Float16 value) {
  const std::uint32_t sign = std::uint32_t{value.bits & 0x8000u} << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude < 0x0400) {
    return bit_cast<float>(bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24f) | sign);
  }
  const std::uint32_t widened = magnitude << 13;
  if (magnitude < 0x7c00) return bit_cast<float>(sign | (widened + (112u << 23)));
  const std::uint32_t quiet = magnitude > 0x7c00 ? 0x00400000u : 0u;
  return bit_cast<float>(sign | widened | 0x7f800000u | quiet);
}

inline void round_to(float value, float& out) { out = value; }

inline void round_to(float value, Bfloat16& out) {
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t ties_to_even = 0x7fffu + ((bits >> 16) & 1u);
  out.bits = value != value ? 0x7fc0 : static_cast<std::uint16_t>((bits + ties_to_even) >> 16);
}

inline std::uint32_t float16_magnitude(std::uint32_t bits) {
  if (bits > 0x7f800000u) return 0x7e00u | ((bits >> 13) & 0x3ffu);
  if (bits >= 0x477ff000u) return 0x7c00u;
  // Below the smallest normal float16 its spacing is 2^-24, which is the spacing of floats at one half.
  if (bits < 0x38800000u) return bit_cast<std::uint32_t>(bit_cast<float>(bits) + 0.5f) - 0x3f000000u;
  return (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
}

inline void round_to(float value, Float16& out) {
  const auto bits = bit_cast<std::uint32_t>(value);
  out.bits = static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | float16_magnitude(bits & 0x7fffffffu));
}

constexpr std::uint32_t kHashFactor = 0x85ebca77u;

struct Portable {
  using Reg = float;
  static constexpr int kWidth = 1;

  template <class T>
  static Reg load(const T* address) {
    T value;
    std::memcpy(&value, address, sizeof(value));
    return to_float(value);
  }

  template <class T>
  static void store(T* address, Reg reg) {
    T value;
    round_to(reg, value);
    std::memcpy(address, &value, sizeof(value));
  }

  static Reg load_split(const Bfloat16* upper, const std::int16_t* residual) {
    Bfloat16 high;
    std::int16_t low;
    std::memcpy(&high, upper, sizeof(high));
    std::memcpy(&low, residual, sizeof(low));
    return bit_cast<float>((std::uint32_t{high.bits} << 16) + static_cast<std::uint32_t>(low));
  }

  static void store_split(Bfloat16* upper, std::int16_t* residual, Reg reg) {
    const auto bits = bit_cast<std::uint32_t>(reg);
    const auto quiet = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | 0x7fc0u);
    const auto rounded = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    const bool is_nan = reg != reg;
    const Bfloat16 high{is_nan ? quiet : rounded};
    const auto low = static_cast<std::uint16_t>(is_nan ? 0 : bits);
    std::memcpy(upper, &high, sizeof(high));
    std::memcpy(residual, &low, sizeof(low));
  }

  static Reg set(float value) { return value; }
  static Reg add(Reg a, Reg b) { return a + b; }
  static Reg xor_sign(Reg a, Reg b) {
    return bit_cast<float>(bit_cast<std::uint32_t>(a) ^ (bit_cast<std::uint32_t>(b) & 0x80000000u));
  }
  static Reg mul(Reg a, Reg b) { return a * b; }
  static Reg fma(Reg a, Reg b, Reg c) { return std::fma(a, b, c); }
  static Reg div(Reg a, Reg b) { return a / b; }
  static Reg sqrt(Reg a) { return std::sqrt(a); }
  static Reg sub(Reg a, Reg b) { return a - b; }
  static Reg min(Reg a, Reg b) { return a < b ? a : b; }
  static Reg max(Reg a, Reg b) { return a > b ? a : b; }
  static Reg truncate(Reg a) { return std::trunc(a); }
  static Reg magnitude(Reg a) { return std::fabs(a); }
  static Reg one_if_greater(Reg a, Reg b) { return a > b ? 1.0f : 0.0f; }

  static Reg larger_magnitude(Reg a, Reg b) {
    const auto left = bit_cast<std::uint32_t>(std::fabs(a)), right = bit_cast<std::uint32_t>(std::fabs(b));
    return bit_cast<float>(left > right ? left : right);
  }

  static float largest_lane(Reg magnitudes) { return magnitudes; }

  static Reg hash_to_unit(Reg value, std::uint32_t seed) {
    const std::uint32_t hash = (bit_cast<std::uint32_t>(value) ^ seed) * kHashFactor;
    return static_cast<float>(hash >> 8) * 0x1p-24f;
  }

  template <class Code>
  static Reg load_codes(const Code* codes) {
    return static_cast<float>(*codes);
  }

  template <class Code>
  static void store_codes(Code* codes, Reg reg) {
    *codes = static_cast<Code>(reg);
  }

  using Wide = double;
  static constexpr int kWidePerReg = 1;

  static void add_squares(Wide* sums, Reg reg) { *sums += static_cast<double>(reg) * reg; }
};

}  // namespace
}  // namespace offload
