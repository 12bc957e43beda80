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

// Write 16-bit numbers (num_outputs, num_groups), a lane each, `offset` bytes after the start of each group.
void pack_factors(const Linear& linear, const void* factors, int64_t offset, int64_t panel, uint8_t* out) {
  const int64_t num_groups = linear.num_groups(), group_bytes = linear.group_bytes();
  for (int64_t lane = 0; lane < lanes_of(linear, panel); lane++) {
    const f16* row = static_cast<const f16*>(factors) + (panel * kLanes + lane) * num_groups;
    for (int64_t g = 0; g < num_groups; g++) memcpy(out + g * group_bytes + offset + lane * 2, row + g, 2);
  }
}

}  // namespace

void ss_pack_dense(int64_t kind, const void* weight, int64_t num_outputs, int64_t num_inputs, void* packed,
                   int64_t num_threads) {
  const Linear linear{kind, static_cast<uint8_t*>(packed), nullptr, num_outputs, num_inputs};
  each_panel(linear, num_threads, [&](int64_t panel, uint8_t* out) {
    with_type(kind, [&](auto number) {  // a float kind has its dtype's number
      using T = decltype(number);
      const int64_t step = kind == kDenseBf16 ? 2 : 1;  // inputs of a lane that stand together
      for (int64_t lane = 0; lane < lanes_of(linear, panel); lane++) {
        const T* row = static_cast<const T*>(weight) + (panel * kLanes + lane) * num_inputs;
        for (int64_t i = 0; i < num_inputs; i++)
          reinterpret_cast<T*>(out)[(i / step * kLanes + lane) * step + i % step] = row[i];
      }
    });
  });
}

void ss_pack_int8(const int8_t* q, const void* scales, int64_t num_outputs, int64_t num_inputs, void* packed,
                  int64_t num_threads) {
  const Linear linear{kInt8, static_cast<uint8_t*>(packed), nullptr, num_outputs, num_inputs};
  const int64_t group_bytes = linear.group_bytes();
  each_panel(linear, num_threads, [&](int64_t panel, uint8_t* out) {
    for (int64_t lane = 0; lane < lanes_of(linear, panel); lane++) {
      const int8_t* row = q + (panel * kLanes + lane) * num_inputs;
      for (int64_t i = 0; i < num_inputs; i++)
        out[i / kGroup * group_bytes + (i % kGroup / 4 * kLanes + lane) * 4 + i % 4] = uint8_t(row[i]);
    }
    pack_factors(linear, scales, linear.q_bytes(), panel, out);
  });
}

void ss_pack_int4(const uint8_t* q, const void* scales, const void* minima, int64_t num_outputs, int64_t num_inputs,
                  void* packed, int64_t num_threads) {
  const Linear linear{kInt4, static_cast<uint8_t*>(packed), nullptr, num_outputs, num_inputs};
  const int64_t group_bytes = linear.group_bytes();
  each_panel(linear, num_threads, [&](int64_t panel, uint8_t* out) {
    for (int64_t lane = 0; lane < lanes_of(linear, panel); lane++) {
      const uint8_t* row = q + (panel * kLanes + lane) * num_inputs;
      for (int64_t i = 0; i < num_inputs; i++) {  // 4 inputs in low nibbles, the next 4 in high ones
        const int64_t line = i % kGroup / 8;
        uint8_t& byte = out[i / kGroup * group_bytes + (line * kLanes + lane) * 4 + i % 4];
        byte = uint8_t(byte | row[i] << (i % 8 < 4 ? 0 : 4));
      }
    }
    pack_factors(linear, scales, linear.q_bytes(), panel, out);
    pack_factors(linear, minima, linear.q_bytes() + kLanes * 2, panel, out);
  });
}
