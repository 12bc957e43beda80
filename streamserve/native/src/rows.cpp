// From panels back to rows. See rows.h, and linear.h for the panels.
#include "rows.h"

#include <vector>

#include "abi.h"

using namespace ss;

namespace {

template <class T>
void unpack_dense(const Linear& linear, const uint8_t* panel, int64_t lane, float* out) {
  const int64_t step = linear.kind == kDenseBf16 ? 2 : 1;  // inputs of a lane that stand together
  const T* numbers = reinterpret_cast<const T*>(panel);
  for (int64_t i = 0; i < linear.num_inputs; i++) out[i] = to_float(numbers[(i / step * kLanes + lane) * step + i % step]);
}

float read_half(const uint8_t* address) {
  f16 value;
  memcpy(&value, address, sizeof value);
  return to_float(value);
}

void unpack_groups(const Linear& linear, const uint8_t* panel, int64_t lane, float* out) {
  const bool is_int8 = linear.kind == kInt8;
  for (int64_t first = 0; first < linear.num_inputs; first += kGroup, panel += linear.group_bytes()) {
    const uint8_t* factors = panel + linear.q_bytes() + lane * 2;
    const float scale = read_half(factors), minimum = is_int8 ? 0 : read_half(factors + kLanes * 2);
    const int64_t rest = linear.num_inputs - first;
    for (int64_t i = 0; i < kGroup && i < rest; i++) {
      if (is_int8) {
        out[first + i] = float(int8_t(panel[(i / 4 * kLanes + lane) * 4 + i % 4])) * scale;
      } else {  // 4 inputs in low nibbles, the next 4 in high ones
        const uint8_t byte = panel[(i / 8 * kLanes + lane) * 4 + i % 4];
        out[first + i] = float(i % 8 < 4 ? byte & 15 : byte >> 4) * scale + minimum;
      }
    }
  }
}

}  // namespace

void ss::unpack_row(const Linear& linear, int64_t row, float* out) {
  const uint8_t* panel = linear.data + row / kLanes * linear.panel_bytes();
  if (linear.kind >= kInt8) return unpack_groups(linear, panel, row % kLanes, out);
  with_type(linear.kind, [&](auto number) {  // a float kind has its dtype's number
    unpack_dense<decltype(number)>(linear, panel, row % kLanes, out);
  });
}

Status ss_linear_rows(int64_t kind, const void* packed, int64_t num_outputs, int64_t num_inputs, const int64_t* rows,
                      int64_t num_rows, int64_t y_dtype, void* y, int64_t num_threads) {
  return status_of([&] {
    require_below(num_outputs, rows, num_rows);
    const Linear linear{kind, static_cast<const uint8_t*>(packed), nullptr, num_outputs, num_inputs};
    parallel(num_threads < num_rows ? num_threads : num_rows, [&](Team team) {
      std::vector<float> numbers(static_cast<size_t>(num_inputs));
      const Range part = team.part(num_rows);
      for (int64_t row = part.begin; row < part.end; row++) {
        unpack_row(linear, rows[row], numbers.data());
        with_type(y_dtype, [&](auto number) {
          auto* out = static_cast<decltype(number)*>(y) + row * num_inputs;
          for (int64_t i = 0; i < num_inputs; i++) from_float(numbers[i], out[i]);
        });
      }
    });
  });
}
