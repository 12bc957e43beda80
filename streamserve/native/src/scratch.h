// Memory of a thread that grows to the largest request and stays: no call returns it to the system and faults it in
// again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

namespace ss {

// One buffer each; a function that calls another while it uses a buffer needs another name.
enum ScratchName {
  kLinearInputs, kStepInputs, kStepRow, kExperts, kExpertInputs, kExpertRow, kAdapterInputs, kAdapterInner,
  kStepHidden, kStepQkv, kStepAttended, kStepChange, kStepBoth, kStepPartials, kStepAllInputs, kStepInner, kStepGated,
  kNumScratch
};

class ScratchBuffer {
 public:
  ~ScratchBuffer() { release(); }

  // Return at least `size` bytes.
  uint8_t* reserve(int64_t size) {
    if (size_ < size) {
      release();
      const int64_t larger = (size + std::min(size / 2, kMostSpare) + 63) / 64 * 64;
      data_ = static_cast<uint8_t*>(::operator new(size_t(larger), kAlignment));
      size_ = larger;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  static constexpr int64_t kMostSpare = 1 << 20;  // bytes
  uint8_t* data_ = nullptr;
  int64_t size_ = 0;

  void release() {
    ::operator delete(data_, kAlignment);
    data_ = nullptr;
    size_ = 0;
  }
};

// Return at least `size` bytes, aligned to 64, with anything in them; valid until this thread's next call with NAME.
// Throws std::bad_alloc.
template <ScratchName NAME>
uint8_t* scratch(int64_t size) {
  static thread_local ScratchBuffer buffer;
  return buffer.reserve(size);
}

}  // namespace ss
