// y = x W^T + b, for every kind of weight and any number of rows, as pieces that a parallel region is made of.
//
// Weights are packed in panels of 16 outputs: what a panel holds for one input stands together, a lane for each output.
// A tile of rows x panels goes through all inputs from the first to the last, and each (row, output) has a lane of its
// own to sum in. So no sum is split, no lanes are added up at the end, and a number is bitwise the same whatever other
// rows are there, how many they are, and which thread computes it.
//
//     float kinds   [panel][input][16]            bf16: [panel][pair of inputs][16][2]
//     int8          [panel][group]: q [8][16][4], then scales [16], fp16
//     int4          [panel][group]: q [4][16][4], two inputs a byte, then scales [16] and minima [16], fp16
//
// Groups are 32 inputs: w = scale * q (int8: q -127..127) or scale * q + minimum (int4: q 0..15). The grouped kinds read
// activations that are quantised to int8 per row and group, as llama.cpp does for q8_0.
//
// Use: `prepare_row` of each row (inputs.h), a barrier, then `multiply` of each thread's panels.
#pragma once

#include "parallel.h"
#include "types.h"

namespace ss {

constexpr int64_t kLanes = 16, kGroup = 32;

enum Kind : int64_t { kDense32 = 0, kDenseBf16 = 1, kDense16 = 2, kInt8 = 3, kInt4 = 4 };

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// A packed weight (num_outputs, num_inputs). `bias`: (num_outputs,) or null.
struct Linear {
  int64_t kind;
  const uint8_t* data;
  const float* bias;
  int64_t num_outputs, num_inputs;

  int64_t num_panels() const { return (num_outputs + kLanes - 1) / kLanes; }
  int64_t num_groups() const { return (num_inputs + kGroup - 1) / kGroup; }
  int64_t panel_bytes() const {
    switch (kind) {
      case kDense32: return num_inputs * kLanes * 4;
      case kDenseBf16: return round_up(num_inputs, 2) * kLanes * 2;
      case kDense16: return num_inputs * kLanes * 2;
      default: return round_up(num_groups() * group_bytes(), 64);
    }
  }
  // Of a grouped kind: bytes of q, and of q with scales and minima, of a panel's group.
  int64_t q_bytes() const { return kLanes * (kind == kInt8 ? kGroup : kGroup / 2); }
  int64_t group_bytes() const { return q_bytes() + kLanes * (kind == kInt8 ? 2 : 4); }
};

// Where results go: rows of `dtype`, `stride` numbers apart. `adds`: to what is there (a residual).
struct Outputs {
  void* data;
  int64_t dtype, stride;
  bool adds = false;
};

// Compute the outputs of `panels` for all rows. `inputs`: prepared rows (inputs.h), input_stride() bytes apart.
void multiply(const Linear& linear, const uint8_t* inputs, int64_t num_rows, Range panels, const Outputs& outputs);

}  // namespace ss
