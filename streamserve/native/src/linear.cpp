// The linear's functions for Python, and the choice of the kind. See linear.h.
#include "linear.h"

#include "abi.h"
#include "inputs.h"
#include "linear_kinds.h"
#include "scratch.h"
#include "tiles.h"
#include "vec_math.h"

using namespace ss;

namespace {

// So few numbers are converted sooner than threads meet; so many products are worth another thread.
constexpr int64_t kFewNumbers = 8192, kProductsAThread = 65536;

template <class T>
void write_rows(const Linear& linear, const Outputs& outputs, int64_t row, int64_t vec, int64_t num_rows,
                int64_t num_vecs, const float* sums) {
  for (int64_t r = 0; r < num_rows; r++) {
    T* row_out = static_cast<T*>(outputs.data) + (row + r) * outputs.stride;
    for (int64_t first = vec * kWidth; first < (vec + num_vecs) * kWidth; first += kWidth, sums += kWidth) {
      const int64_t count = linear.num_outputs - first;  // the last panel may be wider than W
      T* out = row_out + first;
      Vec value = load(sums);
      if (count >= kWidth) {
        if (linear.bias != nullptr) value = value + load(linear.bias + first);
        if (outputs.adds) value = value + load(out);
        store(out, value);
      } else if (count > 0) {
        if (linear.bias != nullptr) value = value + load_part(linear.bias + first, count);
        if (outputs.adds) value = value + load_part(out, count);
        store_part(out, value, count);
      }
    }
  }
}

}  // namespace

void ss::write_outputs(const Linear& linear, const Outputs& outputs, int64_t row, int64_t vec, int64_t num_rows,
                       int64_t num_vecs, const float* sums) {
  with_type(outputs.dtype, [&](auto number) {
    write_rows<decltype(number)>(linear, outputs, row, vec, num_rows, num_vecs, sums);
  });
}

void ss::multiply(const Linear& linear, const uint8_t* inputs, int64_t num_rows, Range panels, const Outputs& outputs) {
  constexpr int64_t kVecs = kLanes / kWidth;
  const Range vecs{panels.begin * kVecs, panels.end * kVecs};
  if (linear.kind >= kInt8) multiply_grouped(linear, inputs, num_rows, vecs, outputs);
  else multiply_dense(linear, inputs, num_rows, vecs, outputs);
}

int64_t ss_linear_bytes(int64_t kind, int64_t num_outputs, int64_t num_inputs) {
  const Linear linear{kind, nullptr, nullptr, num_outputs, num_inputs};
  return linear.num_panels() * linear.panel_bytes();
}

Status ss_linear(int64_t kind, const void* packed, const float* bias, int64_t num_outputs, int64_t num_inputs,
                 int64_t x_dtype, const void* x, int64_t num_rows, int64_t y_dtype, void* y, int64_t num_threads) {
  return status_of([&] {
    const Linear linear{kind, static_cast<const uint8_t*>(packed), bias, num_outputs, num_inputs};
    const Outputs outputs{y, y_dtype, num_outputs};
    const int64_t stride = input_stride(kind, num_inputs);
    uint8_t* inputs = scratch<kLinearInputs>(num_rows * stride);
    const auto prepare = [&](Range rows) {
      with_type(x_dtype, [&](auto number) {
        const auto* first = static_cast<const decltype(number)*>(x);
        for (int64_t row = rows.begin; row < rows.end; row++)
          prepare_row(kind, num_inputs, first + row * num_inputs, inputs + row * stride);
      });
    };
    const bool is_few = num_rows * num_inputs <= kFewNumbers;
    if (is_few) prepare({0, num_rows});
    const int64_t most_threads = 1 + num_rows * num_outputs * num_inputs / kProductsAThread;
    parallel(num_threads < most_threads ? num_threads : most_threads, [&](Team team) {
      if (!is_few) {
        prepare(team.part(num_rows));
        team.barrier();
      }
      multiply(linear, inputs, num_rows, team.part(linear.num_panels()), outputs);
    });
  });
}
