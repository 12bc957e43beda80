// From a matrix (num_outputs, num_inputs) to panels of 16 outputs, as linear.h draws them. What a panel has beyond the
// matrix is zero.
#include "abi.h"
#include "linear.h"

using namespace ss;

namespace {

// Call body(panel, its first byte) for each panel, zeroed, on all threads.
template <class Body>
void each_panel(const Linear& linear, int64_t num_threads, const Body& body) {
  parallel(num_threads, [&](Team team) {
    const Range panels = team.part(linear.num_panels());
    for (int64_t panel = panels.begin; panel < panels.end; panel++) {
      uint8_t* out = const_cast<uint8_t*>(linear.data) + panel * linear.panel_bytes();
      memset(out, 0, size_t(linear.panel_bytes()));
      body(panel, out);
    }
  });
}

int64_t lanes_of(const Linear& linear, int64_t panel) {
  const int64_t rest = linear.num_outputs - panel * kLanes;
  return rest < kLanes ? rest : kLanes;
}

// Copy the columns of a matrix of T beside each other, `step` inputs of a lane together.
template <class T>
void interleave(const Linear& linear, const T* matrix, int64_t num_columns, int64_t step, int64_t panel, T* out) {
  for (int64_t lane = 0; lane < lanes_of(linear, panel); lane++) {
    const T* row = matrix + (panel * kLanes + lane) * num_columns;
    for (int64_t i = 0; i < num_columns; i++) out[(i / step * kLanes + lane) * step + i % step] = row[i];
  }
}

}  // namespace

void ss_pack_dense(int64_t kind, const void* weight, int64_t num_outputs, int64_t num_inputs, void* packed,
                   int64_t num_threads) {
  const Linear linear{kind, static_cast<uint8_t*>(packed), nullptr, num_outputs, num_inputs};
  each_panel(linear, num_threads, [&](int64_t panel, uint8_t* out) {
    with_type(kind, [&](auto number) {  // a float kind has its dtype's number
      using T = decltype(number);
      const int64_t step = kind == kDenseBf16 ? 2 : 1;
      interleave(linear, static_cast<const T*>(weight), num_inputs, step, panel, reinterpret_cast<T*>(out));
    });
  });
}

void ss_pack_int8(const int8_t* q, const void* scales, int64_t num_outputs, int64_t num_inputs, void* packed,
                  int64_t num_threads) {
  const Linear linear{kInt8, static_cast<uint8_t*>(packed), nullptr, num_outputs, num_inputs};
  const int64_t num_groups = linear.num_groups();
  each_panel(linear, num_threads, [&](int64_t panel, uint8_t* out) {
    interleave(linear, q, num_inputs, 4, panel, reinterpret_cast<int8_t*>(out));
    f16* packed_scales = reinterpret_cast<f16*>(out + num_groups * kGroup * kLanes);
    interleave(linear, static_cast<const f16*>(scales), num_groups, 1, panel, packed_scales);
  });
}

void ss_pack_int4(const uint8_t* q, const void* scales, const void* minima, int64_t num_outputs, int64_t num_inputs,
                  void* packed, int64_t num_threads) {
  const Linear linear{kInt4, static_cast<uint8_t*>(packed), nullptr, num_outputs, num_inputs};
  const int64_t num_groups = linear.num_groups();
  each_panel(linear, num_threads, [&](int64_t panel, uint8_t* out) {
    for (int64_t lane = 0; lane < lanes_of(linear, panel); lane++) {
      const uint8_t* row = q + (panel * kLanes + lane) * num_inputs;
      for (int64_t i = 0; i < num_inputs; i++) {
        uint8_t& byte = out[(i / 8 * kLanes + lane) * 4 + i % 4];  // 4 inputs in low nibbles, the next 4 in high ones
        byte = uint8_t(byte | row[i] << (i % 8 < 4 ? 0 : 4));
      }
    }
    f16* packed_scales = reinterpret_cast<f16*>(out + num_groups * kGroup / 2 * kLanes);
    interleave(linear, static_cast<const f16*>(scales), num_groups, 1, panel, packed_scales);
    interleave(linear, static_cast<const f16*>(minima), num_groups, 1, panel, packed_scales + num_groups * kLanes);
  });
}
