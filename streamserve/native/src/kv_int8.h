// Keys and values in eight bits: each vector has a scale of its own, which stands behind its numbers.
//
//   a row of a pool: [ dim numbers q, int8, -127 to 127 | scale, float32 ]      x = q * scale
//
// Sums are over q, whole numbers that a float has exactly; scales come after them. So decodes and prompts, which sum in
// one order, agree bit for bit here too. A vector with a number that is not finite gets NaN as its scale.
#pragma once

#include "vec_math.h"

namespace ss {

struct q8 {
  int8_t q;
};

inline float to_float(q8 value) { return float(value.q); }

#if defined(__AVX512F__)
inline Vec load(const q8* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
#elif defined(__AVX2__)
inline Vec load(const q8* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
#endif

template <class Kv>
constexpr bool kIsInt8 = false;
template <>
inline constexpr bool kIsInt8<q8> = true;

// Numbers between a row of a pool and the next, for vectors of `dim`.
template <class Kv>
inline int64_t row_stride(int64_t dim) {
  return kIsInt8<Kv> ? dim + int64_t(sizeof(float)) : dim;
}

inline float scale_of(const q8* row, int64_t dim) {
  float scale;
  memcpy(&scale, row + dim, sizeof scale);
  return scale;
}

// Multiply the numbers [begin, end), each of one position, by the scales of that position's vector.
template <class Kv>
inline void apply_scales(float* numbers, const Kv* const* rows, int64_t begin, int64_t end, int64_t dim) {
  if constexpr (kIsInt8<Kv>)
    for (int64_t k = begin; k < end; k++) numbers[k] *= scale_of(rows[k], dim);
}

// Store a vector, `dim` numbers, as a row of a pool.
template <class Kv>
inline void store_vector(const float* from, int64_t dim, Kv* to) {
  map(to, from, dim, [](Vec x) { return x; });
}

template <>
inline void store_vector(const float* from, int64_t dim, q8* to) {
  Vec most = zero(), poison = zero();
  int64_t i = 0;
  for (; i + kWidth <= dim; i += kWidth) {
    const Vec x = load(from + i);
    most = max(most, magnitude(x));
    poison = fma(x, zero(), poison);  // 0, but for what is not finite
  }
  if (i < dim) {
    const Vec x = load_part(from + i, dim - i);
    most = max(most, magnitude(x));
    poison = fma(x, zero(), poison);
  }
  const float lost = sum(poison), scale = lost == 0 ? largest(most) / 127 : lost;
  const float inverse = scale > 1e-30f ? 1 / scale : 0;  // a NaN is not above it either
  const Vec factor = broadcast(inverse), low = broadcast(-127), high = broadcast(127);
  int8_t whole[kWidth];
  const auto quantize = [&](Vec x) { store_int8(whole, max(low, min(high, round(x * factor)))); };
  for (i = 0; i + kWidth <= dim; i += kWidth) {
    quantize(load(from + i));
    memcpy(to + i, whole, kWidth);
  }
  if (i < dim) {
    quantize(load_part(from + i, dim - i));
    memcpy(to + i, whole, dim - i);
  }
  memcpy(to + dim, &scale, sizeof scale);
}

}  // namespace ss
