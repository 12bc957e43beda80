// Rows of activations in the form that a kind of weight multiplies.
//
//     float kinds   float [num_inputs]; for bf16 weights on a processor that multiplies them: bf16, an even number
//     int8, int4    int8 [groups * 32], then float scales [groups], then sums [groups]: what the kind subtracts or adds
#pragma once

#include <algorithm>

#include "linear.h"
#include "simd.h"

namespace ss {

// What multiplies bf16 weights: bf16 where the processor has the instruction, and it is twice as fast.
#if defined(__AVX512BF16__)
using Bf16Input = bf16;
#else
using Bf16Input = float;
#endif

// Bytes from a prepared row to the next one.
inline int64_t input_stride(int64_t kind, int64_t num_inputs) {
  const int64_t padded = round_up(num_inputs, kGroup), num_groups = padded / kGroup;
  if (kind == kInt8 || kind == kInt4) return round_up(padded + num_groups * 8, 64);
  return round_up(padded * (kind == kDenseBf16 ? int64_t(sizeof(Bf16Input)) : 4), 64);
}

// Quantise a group of 32 floats to int8 with scale * 127 = the largest magnitude. Returns the scale, NaN where a number
// is not finite, and the sum of q.
inline float quantize_group(const float* x, int8_t* q, int32_t& sum_of_q) {
  Vec top = zero(), zeros = zero();
  for (int64_t i = 0; i < kGroup; i += kWidth) {
    const Vec values = load(x + i);
    top = max(top, magnitude(values));
    zeros = fma(values, zero(), zeros);
  }
  const float most = largest(top);
  const Vec inverse = broadcast(most > 0 ? 127 / most : 0);
  Vec total = zero();
  for (int64_t i = 0; i < kGroup; i += kWidth) {
    const Vec rounded = round(load(x + i) * inverse);
    store_int8(q + i, rounded);
    total = total + rounded;
  }
  const float finite = sum(zeros);
  sum_of_q = finite == 0 ? int32_t(sum(total)) : 0;
  return most / 127 + finite;
}

// Write the inputs [begin, end) of a row, which are at `x`, in the form of `kind` to the row `out`, input_stride() bytes.
// `begin` is a multiple of kGroup, and so is `end` or it is the row's.
template <class T>
void prepare_part(int64_t kind, int64_t num_inputs, const T* x, Range part, uint8_t* out) {
  if (kind != kInt8 && kind != kInt4) {
    const auto copy = [&](auto* target) {
      const int64_t count = part.end - part.begin;
      target += part.begin;
      int64_t i = 0;
      for (; i + kWidth <= count; i += kWidth) store(target + i, load(x + i));
      for (; i < count; i++) from_float(to_float(x[i]), target[i]);
      for (; i < round_up(count, kGroup); i++) from_float(0.0f, target[i]);
    };
    return kind == kDenseBf16 ? copy(reinterpret_cast<Bf16Input*>(out)) : copy(reinterpret_cast<float*>(out));
  }
  const int64_t num_groups = (num_inputs + kGroup - 1) / kGroup;
  int8_t* q = reinterpret_cast<int8_t*>(out);
  float* scales = reinterpret_cast<float*>(out + num_groups * kGroup);
  float* sums = scales + num_groups;
  for (int64_t first = part.begin; first < part.end; first += kGroup, x += kGroup) {
    const int64_t group = first / kGroup, count = std::min(kGroup, part.end - first);
    float values[kGroup] = {};
    if (count == kGroup) {
      for (int64_t i = 0; i < kGroup; i += kWidth) store(values + i, load(x + i));
    } else {
      for (int64_t i = 0; i < count; i++) values[i] = to_float(x[i]);
    }
    int32_t sum;
    scales[group] = quantize_group(values, q + first, sum);
    if (kind == kInt4) {
      sums[group] = scales[group] * float(sum);
    } else {
      const int32_t offset = -128 * sum;  // weights are multiplied as q + 128 where the instruction wants no sign
      memcpy(sums + group, &offset, 4);
    }
  }
}

// Write a row in the form of `kind` to `out`, input_stride() bytes.
template <class T>
void prepare_row(int64_t kind, int64_t num_inputs, const T* x, uint8_t* out) {
  prepare_part(kind, num_inputs, x, {0, num_inputs}, out);
}

}  // namespace ss
