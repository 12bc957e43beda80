// The library's functions without Python, for the sanitizers: every buffer is as long as its contract says, and no
// longer, so that a read or a write beyond it is found. tests/native/test_sanitizers.py compiles and runs it.
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "check.h"

namespace {

std::atomic<int64_t> num_left{INT64_MAX};  // allocations that succeed

void* allocate(size_t size, size_t alignment) {
  if (num_left.fetch_sub(1) <= 0) throw std::bad_alloc();
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, size) != 0) abort();
  return memory;
}

}  // namespace

void* operator new(size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(size_t size, std::align_val_t alignment) { return allocate(size, size_t(alignment)); }
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { free(memory); }

namespace ss {

int num_failed = 0;
int64_t num_allowed = INT64_MAX;

Limited::Limited() { num_left = num_allowed; }
Limited::~Limited() { num_left = INT64_MAX; }

namespace {

// Each allocation of a call fails in its turn, and all after it: the call says so, and the next call computes.
void check_failures(const char* what, Status (*call)(int64_t), int64_t num_threads) {
  int64_t num_refused = 0;
  Status status = kOutOfMemory;
  for (num_allowed = 0; status == kOutOfMemory && num_allowed < 1000; num_allowed++) {
    status = call(num_threads);
    num_refused += status == kOutOfMemory;
  }
  num_allowed = INT64_MAX;
  expect(status == kDone && num_refused > 0, what, num_threads, num_refused);
  expect(call(num_threads) == kDone, what, num_threads);
}

}  // namespace
}  // namespace ss

int main() {
  using namespace ss;
  expect(ss_self_check() == 0, "the self-check fails");
  for (int64_t num_threads : {1, 3}) {
    check_failures("a draw without memory", draw_once, num_threads);
    check_failures("attention without memory", attend_once, num_threads);
    check_failures("a step without memory", step_once, num_threads);
    check_failures("experts without memory", experts_once, num_threads);
  }
  check_failures("a linear without memory", multiply_once, 1);
  check_linears();
  check_attention();
  check_draws();
  check_steps();
  check_rows_and_experts();
  return num_failed == 0 ? 0 : 1;
}
