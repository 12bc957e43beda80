// The experts of a layer for any number of rows, as a part of a parallel region: router, the feed-forward parts that
// each row takes, and their weighted sum.
//
//     logits = router(norm?(x))                       the num_taken largest, shares by softmax
//     y = norm?(sum over the experts taken of share * down(act(gate) * up))       [gate | up] = gate_up(norm?(x))
//
// The (row, expert) pairs are sorted by expert, so that the weights of an expert are read once for all of its rows. A
// piece of work is some panels of one expert; a thread takes the next piece when it is ready. A row's sum goes through
// its experts in the order of their numbers: a number is bitwise the same whatever other rows are there, how many they
// are, and which thread computes it. A row that is not finite stays so.
#pragma once

#include <atomic>

#include "abi.h"
#include "parallel.h"

namespace ss {

// Rows of numbers of `dtype`, `stride` apart.
struct Rows {
  const void* data;
  int64_t dtype, stride;
};

// What the threads share while they compute experts of `num_rows` rows. P: num_rows * num_taken pairs.
struct ExpertsMemory {
  uint8_t *router_inputs, *inputs;  // prepared rows
  float *logits, *shares;           // (num_rows, num_experts), (P,)
  int64_t* chosen;                  // (P,), of each row in the order of the experts' numbers
  float *both, *outputs;            // of the sorted pairs: (P, 2 * inner) [gate | up], (P, hidden)
  std::atomic<int64_t> next_inner, next_output;  // pieces that no thread has taken
  int64_t num_bytes;

  // Use num_bytes bytes at `data`, aligned to 64.
  ExpertsMemory(const Experts& experts, int64_t num_rows, uint8_t* data);
};

int64_t experts_bytes(const Experts& experts, int64_t num_rows);

// Compute y (num_rows, hidden) of x (num_rows, hidden). All threads of the region call it; each has written its
// team.part(num_rows) of y when it returns.
void run_experts(const Experts& experts, Team team, ExpertsMemory& memory, const Rows& x, int64_t num_rows,
                 const Outputs& y);

}  // namespace ss
