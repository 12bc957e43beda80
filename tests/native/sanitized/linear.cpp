// Linears of every kind against the plain sum.
#include <cmath>

#include "check.h"

namespace ss {
namespace {

template <class T>
Weight pack_dense(int64_t kind, const std::vector<T>& weight, int64_t num_outputs, int64_t num_inputs) {
  Weight out{std::vector<uint8_t>(size_t(ss_linear_bytes(kind, num_outputs, num_inputs))), {}};
  ss_pack_dense(kind, weight.data(), num_outputs, num_inputs, out.packed.data(), 2);
  for (T number : weight) out.plain.push_back(to_float(number));
  return out;
}

Weight pack_grouped(int64_t kind, const std::vector<float>& weight, int64_t num_outputs, int64_t num_inputs) {
  const int64_t num_groups = (num_inputs + 31) / 32;
  Weight out{std::vector<uint8_t>(size_t(ss_linear_bytes(kind, num_outputs, num_inputs))), {}};
  std::vector<uint8_t> q(weight.size());
  std::vector<f16> scales(size_t(num_outputs * num_groups)), minima(scales.size());
  int8_t* signed_q = reinterpret_cast<int8_t*>(q.data());
  if (kind == kInt8) {
    ss_quantize_int8(0, weight.data(), num_outputs, num_inputs, signed_q, scales.data(), 2);
    ss_pack_int8(signed_q, scales.data(), num_outputs, num_inputs, out.packed.data(), 2);
  } else {
    ss_quantize_int4(0, weight.data(), num_outputs, num_inputs, q.data(), scales.data(), minima.data(), 2);
    ss_pack_int4(q.data(), scales.data(), minima.data(), num_outputs, num_inputs, out.packed.data(), 2);
  }
  for (int64_t i = 0; i < num_outputs * num_inputs; i++) {
    const size_t group = size_t(i / num_inputs * num_groups + i % num_inputs / 32), at = size_t(i);
    const float number = kind == kInt8 ? float(signed_q[at]) : float(q[at]);
    out.plain.push_back(to_float(scales[group]) * number + (kind == kInt8 ? 0 : to_float(minima[group])));
  }
  return out;
}

template <class X>
void check_linear(int64_t kind, int64_t x_dtype, int64_t num_outputs, int64_t num_inputs, int64_t num_rows) {
  Numbers numbers;
  const Weight weight = make_weight(kind, num_outputs, num_inputs, numbers);
  const std::vector<X> x = numbers.vector<X>(num_rows * num_inputs);
  const std::vector<float> bias = numbers.vector<float>(num_outputs);
  std::vector<float> y(size_t(num_rows * num_outputs));
  ss_linear(kind, weight.packed.data(), bias.data(), num_outputs, num_inputs, x_dtype, x.data(), num_rows, 0, y.data(),
            2);
  double difference = 0, size = 0;
  for (int64_t row = 0; row < num_rows; row++) {
    for (int64_t n = 0; n < num_outputs; n++) {
      double wanted = bias[size_t(n)];
      for (int64_t k = 0; k < num_inputs; k++)
        wanted += double(to_float(x[size_t(row * num_inputs + k)])) * weight.plain[size_t(n * num_inputs + k)];
      const double found = y[size_t(row * num_outputs + n)];
      difference += (found - wanted) * (found - wanted), size += wanted * wanted;
    }
  }
  expect(std::sqrt(difference) <= 0.03 * std::sqrt(size) + 1e-3, "a linear differs: kind, outputs, inputs, rows", kind,
         num_outputs, num_inputs, num_rows);
}

}  // namespace

Weight make_weight(int64_t kind, int64_t num_outputs, int64_t num_inputs, Numbers& numbers) {
  const int64_t count = num_outputs * num_inputs;
  if (kind == kDense32) return pack_dense(kind, numbers.vector<float>(count), num_outputs, num_inputs);
  if (kind == kDenseBf16) return pack_dense(kind, numbers.vector<bf16>(count), num_outputs, num_inputs);
  if (kind == kDense16) return pack_dense(kind, numbers.vector<f16>(count), num_outputs, num_inputs);
  return pack_grouped(kind, numbers.vector<float>(count), num_outputs, num_inputs);
}

void check_linears() {
  const int64_t sizes[][2] = {{1, 1}, {16, 32}, {17, 33}, {70, 100}, {35, 64}, {130, 31}};
  for (int64_t kind = 0; kind < 5; kind++)
    for (const auto& size : sizes)
      for (int64_t num_rows : {1, 2, 5, 19}) {
        check_linear<float>(kind, 0, size[0], size[1], num_rows);
        check_linear<bf16>(kind, 1, size[0], size[1], num_rows);
        check_linear<f16>(kind, 2, size[0], size[1], num_rows);
      }
}

Status multiply_once(int64_t num_threads) {
  Numbers numbers;
  const int64_t num_outputs = 300, num_inputs = 200, num_rows = 70;
  const Weight weight = make_weight(kInt8, num_outputs, num_inputs, numbers);
  const std::vector<float> x = numbers.vector<float>(num_rows * num_inputs);
  std::vector<float> y(size_t(num_rows * num_outputs));
  const Limited limited;
  return ss_linear(kInt8, weight.packed.data(), nullptr, num_outputs, num_inputs, 0, x.data(), num_rows, 0, y.data(),
                   num_threads);
}

}  // namespace ss
