// What the checks of each part share: what they say when a number is wrong, numbers, and packed weights.
#pragma once

#include <cstdio>
#include <vector>

#include "abi.h"
#include "types.h"

namespace ss {

extern int num_failed;

template <class... Sizes>
void expect(bool holds, const char* what, Sizes... sizes) {
  if (holds) return;
  num_failed++;
  fprintf(stderr, "%s:", what);
  (fprintf(stderr, " %ld", long(sizes)), ...);
  fprintf(stderr, "\n");
}

// Numbers that look random and are the same every time, from -1 to 1.
struct Numbers {
  uint32_t state = 1;

  float next() {
    state = state * 1664525u + 1013904223u;
    return float(int32_t(state)) / 2147483648.0f;
  }
  int64_t below(int64_t limit) { return int64_t((next() + 1) / 2 * float(limit)) % limit; }

  template <class T>
  std::vector<T> vector(int64_t count) {
    std::vector<T> out(static_cast<size_t>(count));
    for (T& number : out) from_float(next(), number);
    return out;
  }
};

// A weight (num_outputs, num_inputs), packed as `kind`, and what it stands for.
struct Weight {
  std::vector<uint8_t> packed;
  std::vector<float> plain;
};
Weight make_weight(int64_t kind, int64_t num_outputs, int64_t num_inputs, Numbers& numbers);

void check_linears();
void check_attention();
void check_draws();
void check_steps();
void check_rows_and_experts();

// Calls whose allocations are to fail: the library is called while a Limited lives, and `num_allowed` of them succeed.
extern int64_t num_allowed;
struct Limited {
  Limited();
  ~Limited();
};
Status attend_once(int64_t num_threads);
Status draw_once(int64_t num_threads);
Status step_once(int64_t num_threads);
Status experts_once(int64_t num_threads);
Status multiply_once(int64_t num_threads);

}  // namespace ss
