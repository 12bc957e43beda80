// The library's functions without Python, for the sanitizers: every buffer is as long as its contract says, and no
// longer, so that a read or a write beyond it is found. tests/native/test_sanitizers.py compiles and runs it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "abi.h"
#include "types.h"

using namespace ss;

namespace {

int num_failed = 0;

void expect(bool holds, const char* what, int64_t kind, int64_t num_outputs, int64_t num_inputs, int64_t num_rows) {
  if (holds) return;
  num_failed++;
  fprintf(stderr, "%s: kind %ld, %ld x %ld, %ld rows\n", what, long(kind), long(num_outputs), long(num_inputs),
          long(num_rows));
}

// Numbers that look random and are the same every time, from -1 to 1.
struct Numbers {
  uint32_t state = 1;
  float next() {
    state = state * 1664525u + 1013904223u;
    return float(int32_t(state)) / 2147483648.0f;
  }
  template <class T>
  std::vector<T> vector(int64_t count) {
    std::vector<T> out(static_cast<size_t>(count));
    for (T& number : out) from_float(next(), number);
    return out;
  }
};

struct Weight {
  std::vector<uint8_t> packed;
  std::vector<float> plain;
};

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
  if (kind == 3) {
    ss_quantize_int8(0, weight.data(), num_outputs, num_inputs, signed_q, scales.data(), 2);
    ss_pack_int8(signed_q, scales.data(), num_outputs, num_inputs, out.packed.data(), 2);
  } else {
    ss_quantize_int4(0, weight.data(), num_outputs, num_inputs, q.data(), scales.data(), minima.data(), 2);
    ss_pack_int4(q.data(), scales.data(), minima.data(), num_outputs, num_inputs, out.packed.data(), 2);
  }
  for (int64_t i = 0; i < num_outputs * num_inputs; i++) {
    const size_t group = size_t(i / num_inputs * num_groups + i % num_inputs / 32), at = size_t(i);
    const float number = kind == 3 ? float(signed_q[at]) : float(q[at]);
    out.plain.push_back(to_float(scales[group]) * number + (kind == 3 ? 0 : to_float(minima[group])));
  }
  return out;
}

template <class X>
void check_linear(int64_t kind, int64_t x_dtype, int64_t num_outputs, int64_t num_inputs, int64_t num_rows) {
  Numbers numbers;
  Weight weight;
  if (kind == 0) weight = pack_dense(kind, numbers.vector<float>(num_outputs * num_inputs), num_outputs, num_inputs);
  else if (kind == 1) weight = pack_dense(kind, numbers.vector<bf16>(num_outputs * num_inputs), num_outputs, num_inputs);
  else if (kind == 2) weight = pack_dense(kind, numbers.vector<f16>(num_outputs * num_inputs), num_outputs, num_inputs);
  else weight = pack_grouped(kind, numbers.vector<float>(num_outputs * num_inputs), num_outputs, num_inputs);
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
  expect(std::sqrt(difference) <= 0.03 * std::sqrt(size) + 1e-3, "a linear differs", kind, num_outputs, num_inputs,
         num_rows);
}

}  // namespace

int main() {
  expect(ss_self_check() == 0, "the self-check fails", 0, 0, 0, 0);
  const int64_t sizes[][2] = {{1, 1}, {16, 32}, {17, 33}, {70, 100}, {35, 64}, {130, 31}};
  for (int64_t kind = 0; kind < 5; kind++)
    for (const auto& size : sizes)
      for (int64_t num_rows : {1, 2, 5, 19}) {
        check_linear<float>(kind, 0, size[0], size[1], num_rows);
        check_linear<bf16>(kind, 1, size[0], size[1], num_rows);
        check_linear<f16>(kind, 2, size[0], size[1], num_rows);
      }
  return num_failed == 0 ? 0 : 1;
}
