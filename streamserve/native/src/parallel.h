// One parallel region on the OpenMP pool that the process has, which is torch's.
//
// A second libgomp would fight torch's for the cores, so this library links none. GOMP_parallel is what a compiler makes
// of `#pragma omp parallel`; libgomp has it, and LLVM's and Intel's runtimes have it for compatibility. The symbols are
// weak: a process without OpenMP computes with one thread. No pragma is used, so every compiler makes the same code.
//
// The threads meet at a barrier of our own. It lets go of those that wait when a thread fails, so that any thread may
// allocate memory at any place: std::bad_alloc in one of them becomes std::bad_alloc in `parallel`'s caller.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned flags) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

namespace ss {

struct Range {
  int64_t begin, end;
};

// Where the threads of a region wait for each other. They spin for as long as threads of one speed are apart, then sleep:
// a thread that the system has taken off its core is not waited for on the core that it needs. (Beside other work, a
// long spin as libgomp's makes the median of a step four times as long: docs/log.md.)
class Barrier {
 public:
  // Return when all threads are here. Throws std::bad_alloc if one of them failed.
  void wait(int64_t num_threads) {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (has_failed()) throw std::bad_alloc();
    if (num_here_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      num_here_.store(0, std::memory_order_relaxed);
      open(phase + 1);
    } else {
      for (int i = 0; i < kSpins && phase_.load(std::memory_order_acquire) == phase; i++) pause();
      while (phase_.load(std::memory_order_acquire) == phase) sleep(phase);
    }
    if (has_failed()) throw std::bad_alloc();
  }

  // Say that a thread failed and will not come.
  void fail() {
    has_failed_.store(true, std::memory_order_release);
    open(phase_.load(std::memory_order_relaxed) + 1);
  }
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }

 private:
  // Some 10 to 20 microseconds: more than threads of one speed are apart, less than a wake-up from sleep.
  static constexpr int kSpins = 500;

  std::atomic<uint32_t> phase_{0};
  std::atomic<int64_t> num_here_{0}, num_asleep_{0};
  std::atomic<bool> has_failed_{false};

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Sequentially consistent with `sleep`: a thread that does not see the new phase is seen asleep.
  void open(uint32_t phase) {
    phase_.store(phase);
    if (num_asleep_.load() == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
  }
  void sleep(uint32_t phase) {
#if defined(__linux__)
    num_asleep_.fetch_add(1);
    syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
    num_asleep_.fetch_sub(1);
#else
    (void)phase;
    sched_yield();
#endif
  }
};

// The threads of a region, as one of them sees it.
struct Team {
  int64_t thread, num_threads;
  Barrier* meeting;

  // Wait until every thread of the region is here.
  void barrier() const {
    if (num_threads > 1) meeting->wait(num_threads);
  }

  // This thread's part of 0..count, in whole multiples of `quantum` but for the last.
  Range part(int64_t count, int64_t quantum = 1) const {
    const int64_t units = (count + quantum - 1) / quantum;
    const int64_t begin = units * thread / num_threads * quantum, end = units * (thread + 1) / num_threads * quantum;
    return {begin < count ? begin : count, end < count ? end : count};
  }
};

// Call body(Team) on `num_threads` threads, and return when all have. Throws std::bad_alloc if one of them did.
template <class Body>
void parallel(int64_t num_threads, const Body& body) {
  if (num_threads <= 1 || GOMP_parallel == nullptr) return body(Team{0, 1, nullptr});
  struct Region {
    const Body& body;
    Barrier meeting;
  } region{body, {}};
  GOMP_parallel(
      [](void* data) {
        Region& region = *static_cast<Region*>(data);
        try {
          region.body(Team{omp_get_thread_num(), omp_get_num_threads(), &region.meeting});
        } catch (const std::exception&) {
          region.meeting.fail();
        }
      },
      &region, static_cast<unsigned>(num_threads), 0);
  if (region.meeting.has_failed()) throw std::bad_alloc();
}

}  // namespace ss
