// Include only between a `#pragma GCC target("avx2,fma,f16c")` and the end of the file.
#pragma once

#include <immintrin.h>

#include "simd_portable.h"

namespace offload {
namespace {

struct Avx2 {
  using Reg = __m256;
  static constexpr int kWidth = 8;

  static Reg load(const float* address) { return _mm256_loadu_ps(address); }

  static Reg load(const Bfloat16* address) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(address));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }

  static Reg load(const Float16* address) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
  }

  static void store(float* address, Reg reg) { _mm256_storeu_ps(address, reg); }

  // Keeps the lower 16 bits of each lane, which must be all there is.
  static void store_low16(void* address, __m256i lanes) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lanes, lanes), 0b1000);
    _mm_storeu_si128(static_cast<__m128i*>(address), _mm256_castsi256_si128(packed));
  }

  static void store(Bfloat16* address, Reg reg) {
    const __m256i bits = _mm256_castps_si256(reg);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i ties_to_even = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, ties_to_even), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(reg, reg, _CMP_UNORD_Q));
    store_low16(address, _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan));
  }

  static void store(Float16* address, Reg reg) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(address), _mm256_cvtps_ph(reg, _MM_FROUND_TO_NEAREST_INT));
  }

  static Reg load_split(const Bfloat16* upper, const std::int16_t* residual) {
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper)));
    const __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(residual)));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 16), low));
  }

  static void store_split(Bfloat16* upper, std::int16_t* residual, Reg reg) {
    const __m256i bits = _mm256_castps_si256(reg);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(reg, reg, _CMP_UNORD_Q));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x8000));
    const __m256i quiet = _mm256_or_si256(sign, _mm256_set1_epi32(0x7fc0));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
    const __m256i low = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
    store_low16(upper, _mm256_blendv_epi8(rounded, quiet, is_nan));
    store_low16(residual, _mm256_andnot_si256(is_nan, low));
  }

  static Reg xor_sign(Reg a, Reg b) { return _mm256_xor_ps(a, _mm256_and_ps(b, _mm256_set1_ps(-0.0f))); }

  static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg set(float value) { return _mm256_set1_ps(value); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
  static Reg sqrt(Reg a) { return _mm256_sqrt_ps(a); }

  static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static Reg min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static Reg truncate(Reg a) { return _mm256_round_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
  static Reg magnitude(Reg a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }

  static Reg one_if_greater(Reg a, Reg b) {
    return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), _mm256_set1_ps(1));
  }

  static Reg larger_magnitude(Reg a, Reg b) {
    const __m256i left = _mm256_castps_si256(magnitude(a)), right = _mm256_castps_si256(magnitude(b));
    return _mm256_castsi256_ps(_mm256_max_epi32(left, right));
  }

  static float largest_lane(Reg magnitudes) {
    const __m256i lanes = _mm256_castps_si256(magnitudes);
    __m128i largest = _mm_max_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    largest = _mm_max_epi32(largest, _mm_shuffle_epi32(largest, 0b1110));
    largest = _mm_max_epi32(largest, _mm_shuffle_epi32(largest, 0b0001));
    return bit_cast<float>(_mm_cvtsi128_si32(largest));
  }

  static Reg hash_to_unit(Reg value, std::uint32_t seed) {
    const __m256i mixed =
        _mm256_xor_si256(_mm256_castps_si256(value), _mm256_set1_epi32(static_cast<int>(seed)));
    const __m256i hash = _mm256_mullo_epi32(mixed, _mm256_set1_epi32(static_cast<int>(kHashFactor)));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(hash, 8)), _mm256_set1_ps(0x1p-24f));
  }

  static Reg load_codes(const std::int8_t* codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
  }

  static Reg load_codes(const std::uint8_t* codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
  }

  static void store_codes(void* codes, Reg reg) {
    const __m256i bytes = _mm256_and_si256(_mm256_cvtps_epi32(reg), _mm256_set1_epi32(0xff));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(static_cast<__m128i*>(codes), _mm_packus_epi16(words, words));
  }

  using Wide = __m256d;
  static constexpr int kWidePerReg = 2;

  static void add_squares(Wide* sums, Reg reg) {
    const Wide low = _mm256_cvtps_pd(_mm256_castps256_ps128(reg));
    const Wide high = _mm256_cvtps_pd(_mm256_extractf128_ps(reg, 1));
    sums[0] = _mm256_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
  }
};

}  // namespace
}  // namespace offload
