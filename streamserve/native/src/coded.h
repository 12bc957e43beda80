// Keys and values in eight bits: a vector's codes, and behind them the scale that they are multiplied by.
//
//   a row of a coded pool: [ dim codes, int8 | scale, float32 ]      number i = code i * scale, codes from -127 to 127
//
// Sums are over codes, whole numbers that a float has exactly; scales come after them. So decodes and prompts, which sum
// in one order, agree bit for bit here too. A vector with a number that is not finite has a scale that is none.
#pragma once

#include "vec_math.h"

namespace ss {

struct q8 {
  int8_t code;
};

inline float to_float(q8 value) { return float(value.code); }

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
constexpr bool kIsCoded = false;
template <>
inline constexpr bool kIsCoded<q8> = true;

// Numbers between a row of a pool and the next, for vectors of `dim`.
template <class Kv>
inline int64_t row_stride(int64_t dim) {
  return kIsCoded<Kv> ? dim + int64_t(sizeof(float)) : dim;
}

inline float scale_of(const q8* row, int64_t dim) {
  float scale;
  memcpy(&scale, row + dim, sizeof scale);
  return scale;
}

// Multiply the numbers [begin, end), each of one position, by the scales of that position's vector.
template <class Kv>
inline void apply_scales(float* numbers, const Kv* const* rows, int64_t begin, int64_t end, int64_t dim) {
  if constexpr (kIsCoded<Kv>)
    for (int64_t k = begin; k < end; k++) numbers[k] *= scale_of(rows[k], dim);
}

// Store a vector as a row of a pool. `from` has whole vectors of numbers or `dim`.
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
  int8_t codes[kWidth];
  const auto code = [&](Vec x) { store_int8(codes, max(low, min(high, round(x * factor)))); };
  for (i = 0; i + kWidth <= dim; i += kWidth) {
    code(load(from + i));
    memcpy(to + i, codes, kWidth);
  }
  if (i < dim) {
    code(load_part(from + i, dim - i));
    memcpy(to + i, codes, dim - i);
  }
  memcpy(to + dim, &scale, sizeof scale);
}

}  // namespace ss
