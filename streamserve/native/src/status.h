// What a function of the library returns in place of an exception, which must not cross a C ABI (library.py raises it).
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>

namespace ss {

enum Status : int64_t { kDone = 0, kOutOfMemory = 1, kOutOfRange = 2 };

// Call body() and return kDone, or why it could not be done.
template <class Body>
Status status_of(const Body& body) {
  try {
    body();
    return kDone;
  } catch (const std::out_of_range&) {
    return kOutOfRange;
  } catch (const std::exception&) {  // bad_alloc, or the length_error of a vector beyond all memory
    return kOutOfMemory;
  }
}

// Throw std::out_of_range unless each of `count` numbers is at least 0 and below `limit`.
inline void require_below(int64_t limit, const int64_t* numbers, int64_t count) {
  bool is_within = true;
  for (int64_t i = 0; i < count; i++) is_within &= uint64_t(numbers[i]) < uint64_t(limit);
  if (!is_within) throw std::out_of_range("");
}

}  // namespace ss
