// Group-wise quantisation of a weight (num_outputs, num_inputs) with real scales: see linear.h for the formats.
//
// int8 takes the scale that reaches the largest magnitude: its rounding is small beside that of the activations. int4
// has 16 numbers for 32 weights, and the range that holds all of them is seldom the best: several ranges are tried, for
// each the scale and the minimum that fit the rounded weights best are solved for (least squares), and the pair with the
// smallest squared error is kept. (The idea is that of make_qkx2_quants of llama.cpp, without its weights.)
#include "abi.h"
#include "linear.h"
#include "simd.h"

using namespace ss;

namespace {

constexpr int kMost = 15, kTries = 16;
constexpr int kParts = int(kGroup) / kWidth;

struct Group {
  Vec values[kParts], mask[kParts];  // the mask is 1 where the matrix has a weight, else 0
  float count;
};

template <class T>
Group load_group(const T* row, int64_t first, int64_t num_inputs) {
  float values[kGroup] = {}, mask[kGroup] = {};
  const int64_t count = num_inputs - first < kGroup ? num_inputs - first : kGroup;
  for (int64_t i = 0; i < count; i++) values[i] = to_float(row[first + i]), mask[i] = 1;
  Group group;
  group.count = float(count);
  for (int p = 0; p < kParts; p++) {
    group.values[p] = load(values + p * kWidth);
    group.mask[p] = load(mask + p * kWidth);
  }
  return group;
}

float half(float value, f16& out) {
  from_float(value, out);
  return to_float(out);
}

// Round the weights to 0..15 for this scale and minimum.
void round_group(const Group& group, float scale, float minimum, Vec (&q)[kParts]) {
  const Vec inverse = broadcast(scale > 0 ? 1 / scale : 0), low = broadcast(minimum);
  for (int p = 0; p < kParts; p++) {
    const Vec rounded = round((group.values[p] - low) * inverse);
    q[p] = min(max(rounded, zero()), broadcast(kMost)) * group.mask[p];
  }
}

float squared_error(const Group& group, float scale, float minimum, const Vec (&q)[kParts]) {
  Vec total = zero();
  for (int p = 0; p < kParts; p++) {
    const Vec difference = (fma(q[p], broadcast(scale), broadcast(minimum)) - group.values[p]) * group.mask[p];
    total = fma(difference, difference, total);
  }
  return sum(total);
}

// The scale and minimum that fit these q best: least squares of w = scale * q + minimum. False if all q are equal.
bool fit(const Group& group, const Vec (&q)[kParts], float& scale, float& minimum) {
  Vec of_q = zero(), of_q2 = zero(), of_w = zero(), of_qw = zero();
  for (int p = 0; p < kParts; p++) {
    of_q = of_q + q[p];
    of_q2 = fma(q[p], q[p], of_q2);
    of_w = of_w + group.values[p];
    of_qw = fma(q[p], group.values[p], of_qw);
  }
  const float n = group.count, sum_q = sum(of_q), sum_w = sum(of_w);
  const float determinant = n * sum(of_q2) - sum_q * sum_q;
  if (determinant <= 0) return false;
  scale = (n * sum(of_qw) - sum_q * sum_w) / determinant;
  minimum = (sum_w - scale * sum_q) / n;
  return scale > 0;
}

void quantize_int4_group(const Group& group, uint8_t* q_out, int64_t count, f16& scale_out, f16& minimum_out) {
  float values[kGroup];
  for (int p = 0; p < kParts; p++) store(values + p * kWidth, group.values[p]);
  float low = values[0], high = low;
  for (int64_t i = 1; i < count; i++) {
    low = values[i] < low ? values[i] : low;
    high = values[i] > high ? values[i] : high;
  }
  Vec q[kParts];
  float best_scale = half((high - low) / kMost, scale_out), best_minimum = half(low, minimum_out);
  round_group(group, best_scale, best_minimum, q);
  float best_error = squared_error(group, best_scale, best_minimum, q);
  for (int attempt = 0; attempt < kTries; attempt++) {
    const float steps = kMost - 1 + 0.125f * float(attempt);  // 14 to 16 steps for the whole range
    round_group(group, (high - low) / steps, low, q);
    float scale, minimum;
    if (!fit(group, q, scale, minimum)) continue;
    f16 short_scale, short_minimum;
    scale = half(scale, short_scale), minimum = half(minimum, short_minimum);
    round_group(group, scale, minimum, q);
    const float error = squared_error(group, scale, minimum, q);
    if (error < best_error) {
      best_error = error, best_scale = scale, best_minimum = minimum;
      scale_out = short_scale, minimum_out = short_minimum;
    }
  }
  round_group(group, best_scale, best_minimum, q);
  for (int p = 0; p < kParts; p++) store(values + p * kWidth, q[p]);
  for (int64_t i = 0; i < count; i++) q_out[i] = uint8_t(values[i]);
}

void quantize_int8_group(const Group& group, int8_t* q_out, int64_t count, f16& scale_out) {
  Vec top = zero();
  for (int p = 0; p < kParts; p++) top = max(top, magnitude(group.values[p]));
  const float scale = half(largest(top) / 127, scale_out);
  const Vec inverse = broadcast(scale > 0 ? 1 / scale : 0), most = broadcast(127);
  int8_t q[kGroup];
  for (int p = 0; p < kParts; p++) {
    store_int8(q + p * kWidth, min(max(round(group.values[p] * inverse), zero() - most), most));
  }
  memcpy(q_out, q, size_t(count));
}

// Call body(group, its first element, its length, its number) for each group, on all threads.
template <class Body>
void each_group(int64_t dtype, const void* weight, int64_t num_outputs, int64_t num_inputs, int64_t num_threads,
                const Body& body) {
  const int64_t num_groups = (num_inputs + kGroup - 1) / kGroup;
  parallel(num_threads, [&](Team team) {
    const Range rows = team.part(num_outputs);
    with_type(dtype, [&](auto number) {
      const auto* matrix = static_cast<const decltype(number)*>(weight);
      for (int64_t row = rows.begin; row < rows.end; row++)
        for (int64_t g = 0; g < num_groups; g++) {
          const int64_t first = g * kGroup, count = num_inputs - first < kGroup ? num_inputs - first : kGroup;
          body(load_group(matrix + row * num_inputs, first, num_inputs), row * num_inputs + first, count,
               row * num_groups + g);
        }
    });
  });
}

}  // namespace

void ss_quantize_int8(int64_t dtype, const void* weight, int64_t num_outputs, int64_t num_inputs, int8_t* q,
                      void* scales, int64_t num_threads) {
  each_group(dtype, weight, num_outputs, num_inputs, num_threads,
             [&](const Group& group, int64_t first, int64_t count, int64_t number) {
               quantize_int8_group(group, q + first, count, static_cast<f16*>(scales)[number]);
             });
}

void ss_quantize_int4(int64_t dtype, const void* weight, int64_t num_outputs, int64_t num_inputs, uint8_t* q,
                      void* scales, void* minima, int64_t num_threads) {
  each_group(dtype, weight, num_outputs, num_inputs, num_threads,
             [&](const Group& group, int64_t first, int64_t count, int64_t number) {
               quantize_int4_group(group, q + first, count, static_cast<f16*>(scales)[number],
                                   static_cast<f16*>(minima)[number]);
             });
}
