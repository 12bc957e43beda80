// Rows of a packed weight, and experts: against plain sums, alone and in company, with one thread and with several.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"

namespace ss {
namespace {

template <class Y>
void check_rows(int64_t kind, int64_t y_dtype, int64_t num_outputs, int64_t num_inputs) {
  Numbers numbers;
  const Weight weight = make_weight(kind, num_outputs, num_inputs, numbers);
  const std::vector<int64_t> rows = {num_outputs - 1, 0, num_outputs / 2, num_outputs - 1};
  std::vector<Y> y(rows.size() * size_t(num_inputs));
  for (int64_t num_threads : {1, 3}) {
    ss_linear_rows(kind, weight.packed.data(), num_outputs, num_inputs, rows.data(), int64_t(rows.size()), y_dtype,
                   y.data(), num_threads);
    double most = 0;
    for (size_t i = 0; i < rows.size(); i++)
      for (size_t k = 0; k < size_t(num_inputs); k++)
        most = std::max(most, std::fabs(double(to_float(y[i * size_t(num_inputs) + k])) -
                                        weight.plain[size_t(rows[i]) * size_t(num_inputs) + k]));
    expect(most <= (y_dtype == kFloat32 ? 1e-5 : 2e-2), "a row differs: kind, outputs, inputs, threads", kind,
           num_outputs, num_inputs, num_threads);
  }
  const int64_t beyond = num_outputs;
  expect(ss_linear_rows(kind, weight.packed.data(), num_outputs, num_inputs, &beyond, 1, y_dtype, y.data(), 1) ==
             kOutOfRange,
         "a row that there is not", kind, num_outputs);
}

struct Shape {
  int64_t hidden, inner, num_experts, num_taken, routing, activation;
  float limit;
  bool has_norms;
};

// A layer's experts with random weights, everything in buffers of its own.
struct Layer {
  Experts experts{};
  Numbers numbers;
  std::vector<Weight> weights;
  std::vector<std::vector<float>> floats;
  std::vector<Linear> gate_up, down;

  Layer(const Shape& shape, int64_t kind) {
    weights.reserve(size_t(2 * shape.num_experts + 1)), floats.reserve(size_t(2 * shape.num_experts + 5));
    for (int64_t i = 0; i < shape.num_experts; i++) {
      gate_up.push_back(linear(kind, 2 * shape.inner, shape.hidden));
      down.push_back(linear(kind, shape.hidden, shape.inner));
    }
    experts.gate_up = gate_up.data(), experts.down = down.data();
    experts.router = linear(kDense32, shape.num_experts, shape.hidden);
    if (shape.has_norms) {
      experts.router_norm = floats_of(shape.hidden), experts.norm = floats_of(shape.hidden);
      experts.after_norm = floats_of(shape.hidden), experts.expert_scale = floats_of(shape.num_experts);
    }
    experts.num_experts = shape.num_experts, experts.num_taken = shape.num_taken, experts.routing = shape.routing;
    experts.activation = shape.activation, experts.limit = shape.limit, experts.alpha = 1.702f, experts.eps = 1e-5f;
  }
  const float* floats_of(int64_t count) {
    floats.push_back(numbers.vector<float>(count));
    return floats.back().data();
  }
  Linear linear(int64_t kind, int64_t num_outputs, int64_t num_inputs) {
    weights.push_back(make_weight(kind, num_outputs, num_inputs, numbers));
    return {kind, weights.back().packed.data(), floats_of(num_outputs), num_outputs, num_inputs};
  }
};

// tests/engine/model/decoder/test_experts.py compares them with torch: here only what is the same has to be so.
template <class T>
void check_experts(const Shape& shape, int64_t kind, int64_t dtype) {
  Layer layer(shape, kind);
  const int64_t num_rows = 23;
  const std::vector<T> x = layer.numbers.vector<T>(num_rows * shape.hidden);
  std::vector<T> together(x.size()), again(x.size()), alone(static_cast<size_t>(shape.hidden));
  expect(ss_experts(&layer.experts, dtype, x.data(), num_rows, together.data(), 1) == kDone, "experts fail", kind);
  expect(ss_experts(&layer.experts, dtype, x.data(), num_rows, again.data(), 3) == kDone, "experts fail", kind);
  const size_t bytes = alone.size() * sizeof(T);
  expect(memcmp(together.data(), again.data(), together.size() * sizeof(T)) == 0, "threads change an expert: kind, dtype",
         kind, dtype);
  double size = 0;
  for (int64_t row = 0; row < num_rows; row++) {
    const size_t at = size_t(row * shape.hidden);
    ss_experts(&layer.experts, dtype, &x[at], 1, alone.data(), 2);
    expect(memcmp(alone.data(), &together[at], bytes) == 0, "company changes an expert: kind, dtype, row", kind, dtype,
           row);
    for (T number : alone) size += std::fabs(double(to_float(number)));
  }
  expect(std::isfinite(size) && size > 0, "experts give no numbers: kind, dtype", kind, dtype);
}

}  // namespace

void check_rows_and_experts() {
  const int64_t sizes[][2] = {{1, 1}, {16, 32}, {17, 33}, {70, 100}, {130, 31}};
  for (int64_t kind = 0; kind < 5; kind++)
    for (const auto& size : sizes) {
      check_rows<float>(kind, 0, size[0], size[1]);
      check_rows<bf16>(kind, 1, size[0], size[1]);
      check_rows<f16>(kind, 2, size[0], size[1]);
    }
  const Shape shapes[] = {{33, 48, 5, 2, kSoftmaxAll, 0, 0, true},
                          {64, 16, 3, 3, kSoftmaxTaken, 2, 0, false},
                          {40, 32, 8, 1, kSoftmaxTaken, 0, 7, false}};
  for (const Shape& shape : shapes)
    for (int64_t kind = 0; kind < 5; kind++) {
      check_experts<float>(shape, kind, 0);
      check_experts<bf16>(shape, kind, 1);
      check_experts<f16>(shape, kind, 2);
    }
}

Status experts_once(int64_t num_threads) {
  Layer layer({64, 32, 4, 2, kSoftmaxAll, 0, 0, true}, kInt8);
  const std::vector<float> x = layer.numbers.vector<float>(9 * 64);
  std::vector<float> y(x.size());
  const Limited limited;
  return ss_experts(&layer.experts, 0, x.data(), 9, y.data(), num_threads);
}

}  // namespace ss
