// Include only between a `#pragma GCC target("avx512f")` and the end of the file.
#pragma once

#include <immintrin.h>

#include "simd_portable.h"

namespace offload {
namespace {

struct Avx512 {
  using Reg = __m512;
  static constexpr int kWidth = 16;

  static Reg load(const float* address) { return _mm512_loadu_ps(address); }

  static Reg load(const Bfloat16* address) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }

  static Reg load(const Float16* address) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(address)));
  }

  static void store(float* address, Reg reg) { _mm512_storeu_ps(address, reg); }

  // Not vcvtneps2bf16: it flushes subnormals, which the other vector types keep.
  static void store(Bfloat16* address, Reg reg) {
    const __m512i bits = _mm512_castps_si512(reg);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i ties_to_even = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, ties_to_even), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(reg, reg, _CMP_UNORD_Q);
    const __m512i lanes = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), _mm512_cvtepi32_epi16(lanes));
  }

  static void store(Float16* address, Reg reg) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), _mm512_cvtps_ph(reg, _MM_FROUND_TO_NEAREST_INT));
  }

  static Reg load_split(const Bfloat16* upper, const std::int16_t* residual) {
    const auto* low_bits = reinterpret_cast<const __m256i*>(residual);
    const __m512i high = _mm512_castps_si512(load(upper));
    return _mm512_castsi512_ps(_mm512_add_epi32(high, _mm512_cvtepi16_epi32(_mm256_loadu_si256(low_bits))));
  }

  static void store_split(Bfloat16* upper, std::int16_t* residual, Reg reg) {
    const __m512i bits = _mm512_castps_si512(reg);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(reg, reg, _CMP_UNORD_Q);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x8000));
    const __m512i quiet = _mm512_or_si512(sign, _mm512_set1_epi32(0x7fc0));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
    const __m512i high = _mm512_mask_mov_epi32(rounded, is_nan, quiet);
    const __m512i low = _mm512_mask_mov_epi32(bits, is_nan, _mm512_setzero_si512());
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(upper), _mm512_cvtepi32_epi16(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(residual), _mm512_cvtepi32_epi16(low));
  }

  static Reg xor_sign(Reg a, Reg b) {
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(b), _mm512_set1_epi32(INT32_MIN));
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), sign));
  }

  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg set(float value) { return _mm512_set1_ps(value); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  static Reg sqrt(Reg a) { return _mm512_sqrt_ps(a); }

  static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static Reg min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static Reg truncate(Reg a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
  static Reg magnitude(Reg a) { return _mm512_abs_ps(a); }

  static Reg one_if_greater(Reg a, Reg b) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), _mm512_set1_ps(1));
  }

  static Reg larger_magnitude(Reg a, Reg b) {
    const __m512i left = _mm512_castps_si512(magnitude(a)), right = _mm512_castps_si512(magnitude(b));
    return _mm512_castsi512_ps(_mm512_max_epi32(left, right));
  }

  static float largest_lane(Reg magnitudes) {
    return bit_cast<float>(_mm512_reduce_max_epi32(_mm512_castps_si512(magnitudes)));
  }

  static Reg hash_to_unit(Reg value, std::uint32_t seed) {
    const __m512i mixed =
        _mm512_xor_si512(_mm512_castps_si512(value), _mm512_set1_epi32(static_cast<int>(seed)));
    const __m512i hash = _mm512_mullo_epi32(mixed, _mm512_set1_epi32(static_cast<int>(kHashFactor)));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(hash, 8)), _mm512_set1_ps(0x1p-24f));
  }

  static Reg load_codes(const std::int8_t* codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }

  static Reg load_codes(const std::uint8_t* codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
  }

  static void store_codes(void* codes, Reg reg) {
    _mm_storeu_si128(static_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(reg)));
  }

  using Wide = __m512d;
  static constexpr int kWidePerReg = 2;

  static void add_squares(Wide* sums, Reg reg) {
    const Wide low = _mm512_cvtps_pd(_mm512_castps512_ps256(reg));
    const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd(reg), 1);
    const Wide high = _mm512_cvtps_pd(_mm256_castpd_ps(upper));
    sums[0] = _mm512_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm512_fmadd_pd(high, high, sums[1]);
  }
};

}  // namespace
}  // namespace offload
