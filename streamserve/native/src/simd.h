// A vector of floats as wide as the level has, with the few operations that kernels need. No operation rounds
// differently on another level but `sum`, whose order follows the width.
#pragma once

#include <cmath>

#include "types.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ss {

#if defined(__AVX512F__)

constexpr int kWidth = 16;
struct Vec {
  __m512 v;
};
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Vec load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline float sum(Vec x) { return _mm512_reduce_add_ps(x.v); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x.v); }
inline Vec round(Vec x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline void store_int8(int8_t* p, Vec x) {  // x: whole numbers from -128 to 127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

#elif defined(__AVX2__)

constexpr int kWidth = 8;
struct Vec {
  __m256 v;
};
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline Vec load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline __m128 halves(Vec x) { return _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1)); }
inline float sum(Vec x) {
  __m128 a = halves(x);
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
inline float largest(Vec x) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
inline Vec round(Vec x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline void store_int8(int8_t* p, Vec x) {  // x: whole numbers from -128 to 127
  const __m256i whole = _mm256_cvtps_epi32(x.v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

#else  // GCC's and clang's own vectors: SSE2, NEON, or plain code

constexpr int kWidth = 4;
struct Vec {
  typedef float Four __attribute__((vector_size(16)));
  Four v;
};
inline Vec broadcast(float x) { return {Vec::Four{x, x, x, x}}; }
inline Vec zero() { return broadcast(0); }
template <class T>
inline Vec load(const T* p) {
  return {Vec::Four{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}};
}
inline void store(float* p, Vec x) { memcpy(p, &x.v, 16); }
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline float sum(Vec x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }
inline float largest(Vec x) {
  const float a = x.v[0] > x.v[2] ? x.v[0] : x.v[2], b = x.v[1] > x.v[3] ? x.v[1] : x.v[3];
  return a > b ? a : b;
}
inline Vec round(Vec x) {
  for (int i = 0; i < kWidth; i++) x.v[i] = std::nearbyint(x.v[i]);
  return x;
}
inline void store_int8(int8_t* p, Vec x) {  // x: whole numbers from -128 to 127
  for (int i = 0; i < kWidth; i++) p[i] = int8_t(x.v[i]);
}

#endif

inline Vec magnitude(Vec x) { return max(x, zero() - x); }

// As `from_float`, bit for bit: to nearest, ties to even; a NaN stays one, and no small number is flushed to zero.
inline void store(bf16* p, Vec x) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_castps_si512(x.v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(kept));
#elif defined(__AVX2__)
  const __m256i bits = _mm256_castps_si256(x.v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), words);
#else
  float values[kWidth];
  store(values, x);
  for (int i = 0; i < kWidth; i++) from_float(values[i], p[i]);
#endif
}
inline void store(f16* p, Vec x) {
  float values[kWidth];
  store(values, x);
  for (int i = 0; i < kWidth; i++) from_float(values[i], p[i]);
}

}  // namespace ss
