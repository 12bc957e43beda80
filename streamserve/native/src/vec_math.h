// What attention, norms and the sampler need beyond simd.h: exp, the ends of rows, sums of four vectors at once.
//
// Written with the compiler's vector extension, so that every level has the same text. `exp` is Cephes' expf (S.
// Moshier): a polynomial on [-ln 2 / 2, ln 2 / 2], within two units in the last place. NaN in, NaN out.
#pragma once

#include "simd.h"

namespace ss {

typedef float Lanes __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef float Quad __attribute__((vector_size(16)));

constexpr float kInfinity = __builtin_inff();

inline Lanes lanes(float x) { return Lanes{} + x; }
inline int64_t padded(int64_t count) { return (count + kWidth - 1) / kWidth * kWidth; }

inline float first(Vec x) { return ((Lanes)x.v)[0]; }

// The first `count` numbers, then zeros.
template <class T>
inline Vec load_part(const T* p, int64_t count) {
  T whole[kWidth] = {};
  memcpy(whole, p, count * sizeof(T));
  return load(whole);
}

template <class T>
inline void store_part(T* p, Vec x, int64_t count) {
  T whole[kWidth];
  store(whole, x);
  memcpy(p, whole, count * sizeof(T));
}

// to[i] = f(from[i]) for `count` numbers, a vector at a time.
template <class To, class From, class Function>
inline void map(To* to, const From* from, int64_t count, const Function& f) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, f(load(from + i)));
  if (i < count) store_part(to + i, f(load_part(from + i, count - i)), count - i);
}

// Copy `count` numbers as floats, and zeros up to a whole vector.
template <class T>
inline void copy_padded(float* to, const T* from, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  if (i < count) store(to + i, load_part(from + i, count - i));
}

inline Vec exp(Vec input) {
#if defined(__AVX512F__)
  const Vec x = input;  // what comes of numbers out of range is replaced in the end
#else
  const Lanes given = (Lanes)input.v;
  const Ints vanishes = given < -87.33f, explodes = given > 88.72f;
  const Vec x = {(decltype(input.v))((vanishes | explodes) ? lanes(0) : given)};
#endif
  const Vec magic = broadcast(0x1.8p23f);  // its addition rounds to an integer, which is then in the low bits
  const Vec shifted = fma(x, broadcast(1.44269504088896341f), magic), n = shifted - magic;
  const Vec r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + broadcast(1);
#if defined(__AVX512F__)
  const __mmask16 stays = _mm512_cmp_ps_mask(input.v, _mm512_set1_ps(-87.33f), _CMP_NLT_UQ);
  const __m512 scaled = _mm512_maskz_scalef_ps(stays, p.v, n.v);
  const __mmask16 explodes = _mm512_cmp_ps_mask(input.v, _mm512_set1_ps(88.72f), _CMP_GT_OQ);
  return {_mm512_mask_mov_ps(scaled, explodes, _mm512_set1_ps(kInfinity))};
#else
  // 2^n in two factors, as n may be 128 or -126.
  const Ints exponent = (Ints)shifted.v - 0x4b400000, half = exponent >> 1;
  const Lanes scaled = (Lanes)p.v * (Lanes)((half + 127) << 23) * (Lanes)((exponent - half + 127) << 23);
  return {(decltype(input.v))(explodes ? lanes(kInfinity) : vanishes ? lanes(0) : scaled)};
#endif
}

// Whether a number is above `least`.
inline bool exceeds(Vec x, float least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(least), _CMP_GT_OQ) != 0;
#else
  return largest(x) > least;
#endif
}

#if defined(__AVX512F__)
// exp within 5e-5, for what is rounded to bf16: 2^n times a polynomial of 2^r, r from -1/2 to 1/2. NaN in, NaN out.
inline Vec rough_exp(Vec x) {
  const Vec y = max(broadcast(-200), x * broadcast(1.44269504088896341f));  // of a NaN and a number the second, NaN
  const Vec n = round(y), r = y - n;
  Vec p = broadcast(9.6181291e-3f);
  p = fma(p, r, broadcast(5.5504109e-2f));
  p = fma(p, r, broadcast(2.4022651e-1f));
  p = fma(p, r, broadcast(6.9314718e-1f));
  p = fma(p, r, broadcast(1));
  return {_mm512_scalef_ps(p.v, n.v)};
}
#else
inline Vec rough_exp(Vec x) { return exp(x); }  // never called
#endif

// Four lanes whose sum is the vector's.
inline Quad fold(Vec x) {
#if defined(__AVX512F__)
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x.v), high);
  return (Quad)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return (Quad)halves(x);
#else
  return x.v;
#endif
}

inline Quad add_pairs(Quad a, Quad b) {
  return Quad{a[0], a[1], b[0], b[1]} + Quad{a[2], a[3], b[2], b[3]};
}

// The sums of four vectors.
inline Quad sums(Vec a, Vec b, Vec c, Vec d) {
  const Quad ab = add_pairs(fold(a), fold(b)), cd = add_pairs(fold(c), fold(d));
  return Quad{ab[0], ab[2], cd[0], cd[2]} + Quad{ab[1], ab[3], cd[1], cd[3]};
}

}  // namespace ss
