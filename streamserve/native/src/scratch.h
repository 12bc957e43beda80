// Memory of a thread that grows to the largest request and stays: no call returns it to the system and faults it in
// again.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace ss {

// One buffer each; a function that calls another while it uses a buffer needs another name.
enum ScratchName { kLinearInputs, kStepInputs, kStepRow, kNumScratch };

struct ScratchBuffer {
  void* data = nullptr;
  int64_t size = 0;
  ~ScratchBuffer() { free(data); }
};

// Return at least `size` bytes, aligned to 64, with anything in them; valid until this thread's next call with NAME.
template <ScratchName NAME>
uint8_t* scratch(int64_t size) {
  static thread_local ScratchBuffer buffer;
  if (buffer.size < size) {
    free(buffer.data);
    buffer.size = (size + size / 2 + 63) / 64 * 64;
    buffer.data = aligned_alloc(64, size_t(buffer.size));
    if (buffer.data == nullptr) abort();
  }
  return static_cast<uint8_t*>(buffer.data);
}

}  // namespace ss
