// What a decoder layer computes beside linears and attention, one row at a time: norms, rotation, activations.
#pragma once

#include <cmath>

#include "vec_math.h"

namespace ss {

enum Activation : int64_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };

// out = x / rms(x) * weight. `out` may be `x`.
inline void rms_norm(const float* x, const float* weight, int64_t count, float eps, float* out) {
  Vec squares = zero();
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) squares = fma(load(x + i), load(x + i), squares);
  if (i < count) squares = fma(load_part(x + i, count - i), load_part(x + i, count - i), squares);
  const Vec factor = broadcast(1 / std::sqrt(sum(squares) / float(count) + eps));
  for (i = 0; i + kWidth <= count; i += kWidth) store(out + i, load(x + i) * factor * load(weight + i));
  if (i < count) store_part(out + i, load_part(x + i, count - i) * factor * load_part(weight + i, count - i), count - i);
}

// The pairs (i, i + num_pairs) of a head turn by the angles whose cosines and sines are given.
inline void rotate(float* head, const float* cosines, const float* sines, int64_t num_pairs) {
  const auto turn = [](Vec& a, Vec& b, Vec c, Vec s) {
    const Vec old = a;
    a = old * c - b * s;
    b = b * c + old * s;
  };
  float *first = head, *second = head + num_pairs;
  int64_t i = 0;
  for (; i + kWidth <= num_pairs; i += kWidth) {
    Vec a = load(first + i), b = load(second + i);
    turn(a, b, load(cosines + i), load(sines + i));
    store(first + i, a);
    store(second + i, b);
  }
  if (i == num_pairs) return;
  const int64_t rest = num_pairs - i;
  Vec a = load_part(first + i, rest), b = load_part(second + i, rest);
  turn(a, b, load_part(cosines + i, rest), load_part(sines + i, rest));
  store_part(first + i, a, rest);
  store_part(second + i, b, rest);
}

inline Vec sigmoid(Vec x) { return broadcast(1) / (broadcast(1) + exp(broadcast(0) - x)); }

inline Vec activate(int64_t activation, Vec x) {
  if (activation == kSilu) return x * sigmoid(x);
  if (activation == kRelu) return max(x, zero());
  if (activation == kGeluTanh)  // 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
    return x * sigmoid(x * fma(x * x, broadcast(2 * 0.7978845608f * 0.044715f), broadcast(2 * 0.7978845608f)));
  float values[kWidth];
  store(values, x);
  for (float& value : values) value *= 0.5f * (1 + std::erf(value * 0.70710678f));
  return load(values);
}

// gate = act(gate) * up
inline void gate(int64_t activation, float* gates, const float* ups, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(gates + i, activate(activation, load(gates + i)) * load(ups + i));
  if (i == count) return;
  const Vec last = activate(activation, load_part(gates + i, count - i)) * load_part(ups + i, count - i);
  store_part(gates + i, last, count - i);
}

// gpt-oss' gate = (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within it. `count`: whole vectors.
inline void gate_clamped(float limit, float alpha, float* gates, const float* ups, int64_t count) {
  const Vec high = broadcast(limit), low = broadcast(-limit);
  for (int64_t i = 0; i < count; i += kWidth) {
    const Vec x = min(high, load(gates + i)), up = max(low, min(high, load(ups + i)));  // NaN, the second, stays
    store(gates + i, (up + broadcast(1)) * (x * sigmoid(x * broadcast(alpha))));
  }
}

}  // namespace ss
