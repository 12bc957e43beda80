// The number types of weights and states: float, and its two short kinds as their bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace ss {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// As Python passes them (library.py).
enum DType : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) { return from_bits(uint32_t(value.bits) << 16); }
inline float to_float(f16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
  if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + 0x38000000));        // exponent bias 15 to 127
  const float magnitude = float(rest) * 5.9604644775390625e-8f;                    // subnormal: units of 2^-24
  return from_bits(sign | to_bits(magnitude));
}

// Round to nearest, ties to even, as torch does.
inline void from_float(float value, float& out) { out = value; }
inline void from_float(float value, bf16& out) {
  const uint32_t bits = to_bits(value);
  if (value != value) out.bits = uint16_t(bits >> 16 | 0x40);
  else out.bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void from_float(float value, f16& out) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) { out.bits = uint16_t(sign | 0x7e00); return; }   // NaN
  if (magnitude >= 0x477ff000) { out.bits = uint16_t(sign | 0x7c00); return; }  // 65,520 and more: infinity
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 rounds to units of 2^-24
    out.bits = uint16_t(sign | (to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f)));
    return;
  }
  out.bits = uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

// Call body(T{}) with the C++ type of `dtype`.
template <class Body>
void with_type(int64_t dtype, const Body& body) {
  if (dtype == kFloat32) body(float{});
  else if (dtype == kBfloat16) body(bf16{});
  else body(f16{});
}

}  // namespace ss
