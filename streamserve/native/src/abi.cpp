// The library's version and its check of itself.
#include "abi.h"

#include "parallel.h"
#include "simd.h"

using namespace ss;

int64_t ss_abi_version() { return kAbiVersion; }

int64_t ss_team_size(int64_t num_threads) {
  int64_t size = 0;
  parallel(num_threads, [&](Team team) {
    if (team.thread == 0) size = team.num_threads;
  });
  return size;
}

int ss_self_check() {
  float values[kWidth], wanted = 0;
  for (int i = 0; i < kWidth; i++) wanted += values[i] = float(i);
  return sum(fma(load(values), broadcast(2), load(values))) == 3 * wanted ? 0 : 1;
}
