// One parallel region on the OpenMP pool that the process has, which is torch's.
//
// A second libgomp would fight torch's for the cores, so this library links none. GOMP_parallel is what a compiler makes
// of `#pragma omp parallel`; libgomp has it, and LLVM's and Intel's runtimes have it for compatibility. The symbols are
// weak: a process without OpenMP computes with one thread. No pragma is used, so every compiler makes the same code.
#pragma once

#include <cstdint>

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned flags) __attribute__((weak));
void GOMP_barrier() __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

namespace ss {

struct Range {
  int64_t begin, end;
};

// The threads of a region, as one of them sees it.
struct Team {
  int64_t thread, num_threads;

  // Wait until every thread of the region is here.
  void barrier() const {
    if (num_threads > 1) GOMP_barrier();
  }

  // This thread's part of 0..count, in whole multiples of `quantum` but for the last.
  Range part(int64_t count, int64_t quantum = 1) const {
    const int64_t units = (count + quantum - 1) / quantum;
    const int64_t begin = units * thread / num_threads * quantum, end = units * (thread + 1) / num_threads * quantum;
    return {begin < count ? begin : count, end < count ? end : count};
  }
};

// Call body(Team) on `num_threads` threads, and return when all have.
template <class Body>
void parallel(int64_t num_threads, const Body& body) {
  if (num_threads <= 1 || GOMP_parallel == nullptr) return body(Team{0, 1});
  GOMP_parallel(
      [](void* data) { (*static_cast<const Body*>(data))(Team{omp_get_thread_num(), omp_get_num_threads()}); },
      const_cast<Body*>(&body), static_cast<unsigned>(num_threads), 0);
}

}  // namespace ss
