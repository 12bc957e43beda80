// From tiles to a matrix: which rows and outputs each tile computes, and how its sums leave. See linear.h.
//
// A Tile computes ROWS x VECS vectors of kWidth outputs over all inputs:
//
//     struct Tile {
//       static constexpr int kMaxRows;
//       static constexpr int vecs(int rows);   // how many vectors beside each other fit the registers
//       template <int ROWS, int VECS> static void compute(linear, inputs, row, vec, float* sums);
//     };
//
// Up to kMaxRows rows are one tile high. More go through a block of vecs(kMaxRows) vectors tile by tile, so that the
// block's weights are read from memory once and then from the cache.
#pragma once

#include "inputs.h"
#include "linear.h"
#include "simd.h"

namespace ss {

// Write `sums` (num_rows, num_vecs vectors) of the rows from `row` and the vectors from `vec` on. In linear.cpp.
void write_outputs(const Linear& linear, const Outputs& outputs, int64_t row, int64_t vec, int64_t num_rows,
                   int64_t num_vecs, const float* sums);

// With few rows memory is waited for, and panels are too short for the processor to foresee what is read next.
constexpr int kPrefetchRows = 2;
constexpr int64_t kPrefetchBytes = 1024;

// How far from a panel's byte `offset` the byte is that is read kPrefetchBytes later: in this panel, else in the panel
// after the `others` that are read beside it.
inline int64_t prefetch_offset(int64_t offset, int64_t panel_bytes, int64_t others) {
  return kPrefetchBytes + (offset + kPrefetchBytes < panel_bytes ? 0 : others * panel_bytes);
}

template <class Tile>
struct Cover {
  const Linear& linear;
  const uint8_t* inputs;
  const Outputs& outputs;

  // All rows of the vectors `begin` to `end`.
  void run(int64_t num_rows, int64_t begin, int64_t end) const { by_rows<Tile::kMaxRows>(num_rows, begin, end); }

 private:
  // At most ROWS rows are a tile's height: find the smallest that holds them, or go through them by kMaxRows.
  template <int ROWS>
  void by_rows(int64_t num_rows, int64_t begin, int64_t end) const {
    if constexpr (ROWS > 1) {
      if (num_rows < ROWS) return by_rows<ROWS - 1>(num_rows, begin, end);
    }
    constexpr int kVecs = Tile::vecs(ROWS);
    for (; begin + kVecs <= end; begin += kVecs) block<ROWS, kVecs>(num_rows, begin);
    for (; begin < end; begin++) block<ROWS, 1>(num_rows, begin);
  }

  template <int ROWS, int VECS>
  void block(int64_t num_rows, int64_t vec) const {
    int64_t row = 0;
    for (; row + ROWS <= num_rows; row += ROWS) tile<ROWS, VECS>(row, vec);
    if constexpr (ROWS == Tile::kMaxRows) rest<ROWS - 1, VECS>(row, num_rows - row, vec);
  }

  // The last rows, fewer than kMaxRows.
  template <int ROWS, int VECS>
  void rest(int64_t row, int64_t num_rows, int64_t vec) const {
    if constexpr (ROWS > 0) {
      if (num_rows == ROWS) return tile<ROWS, VECS>(row, vec);
      rest<ROWS - 1, VECS>(row, num_rows, vec);
    }
  }

  template <int ROWS, int VECS>
  __attribute__((noinline)) void tile(int64_t row, int64_t vec) const {
    float sums[ROWS * VECS * kWidth];
    Tile::template compute<ROWS, VECS>(linear, inputs, row, vec, sums);
    write_outputs(linear, outputs, row, vec, ROWS, VECS, sums);
  }
};

}  // namespace ss
