// Tiles of int8 and int4 weights with a scale (and a minimum) per 32 inputs. See linear.h.
//
// A step is 4 inputs of 16 outputs: 4 bytes a lane, multiplied by 4 bytes of a row and added up in int32, exactly. The
// sum of a group is scaled and added in fp32, group after group.
#include "linear_kinds.h"
#include "tiles.h"

namespace ss {
namespace {

constexpr int kSteps = int(kGroup) / 4;

#if defined(__AVX512VNNI__)

using Bytes = __m512i;
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low_nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }

// vpdpbusd multiplies unsigned by signed bytes: int8 weights as q + 128, whose excess `offset` starts the sum.
template <bool SIGNED>
struct Dot {
  struct Weights {
    __m512i q;
    explicit Weights(Bytes bytes) : q(SIGNED ? _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)) : bytes) {}
  };
  __m512i sums;
  void start(int32_t offset) { sums = _mm512_set1_epi32(SIGNED ? offset : 0); }
  void add(const Weights& weights, int32_t x) { sums = _mm512_dpbusd_epi32(sums, weights.q, _mm512_set1_epi32(x)); }
  Vec value() const { return {_mm512_cvtepi32_ps(sums)}; }
};

#elif defined(__AVX2__)

using Bytes = __m256i;
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes low_nibbles(Bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return low_nibbles(_mm256_srli_epi16(b, 4)); }

// vpmaddubsw adds pairs in int16: |w| times x with w's sign is at most 2 * 127 * 127, which fits.
template <bool SIGNED>
struct Dot {
  struct Weights {
    __m256i q, magnitude;
    explicit Weights(Bytes bytes) : q(bytes), magnitude(_mm256_abs_epi8(bytes)) {}
  };
  __m256i sums;
  void start(int32_t) { sums = _mm256_setzero_si256(); }
  void add(const Weights& weights, int32_t x) {
    const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(x), weights.q);
    const __m256i pairs = _mm256_maddubs_epi16(weights.magnitude, signed_x);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  Vec value() const { return {_mm256_cvtepi32_ps(sums)}; }
};

// q is at most 15: the pairs of all 8 steps, 8 * 2 * 15 * 127, fit in int16.
template <>
struct Dot<false> {
  struct Weights {
    __m256i q;
    explicit Weights(Bytes bytes) : q(bytes) {}
  };
  __m256i sums;
  void start(int32_t) { sums = _mm256_setzero_si256(); }
  void add(const Weights& weights, int32_t x) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights.q, _mm256_set1_epi32(x)));
  }
  Vec value() const { return {_mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)))}; }
};

#else

struct Bytes {
  uint8_t b[4 * kWidth];
};
inline Bytes load_bytes(const uint8_t* p) {
  Bytes bytes;
  memcpy(&bytes, p, sizeof bytes);
  return bytes;
}
inline Bytes low_nibbles(Bytes bytes) {
  for (auto& b : bytes.b) b &= 15;
  return bytes;
}
inline Bytes high_nibbles(Bytes bytes) {
  for (auto& b : bytes.b) b >>= 4;
  return bytes;
}

template <bool SIGNED>
struct Dot {
  using Weights = Bytes;
  int32_t sums[kWidth];
  void start(int32_t) { memset(sums, 0, sizeof sums); }
  void add(const Weights& weights, int32_t x) {
    int8_t four[4];
    memcpy(four, &x, 4);
    for (int lane = 0; lane < kWidth; lane++)
      for (int i = 0; i < 4; i++) {
        const uint8_t byte = weights.b[4 * lane + i];
        sums[lane] += four[i] * (SIGNED ? int32_t(int8_t(byte)) : int32_t(byte));
      }
  }
  Vec value() const {
    float values[kWidth];
    for (int lane = 0; lane < kWidth; lane++) values[lane] = float(sums[lane]);
    return load(values);
  }
};

#endif

template <bool SIGNED>
struct GroupedTile {
  static constexpr int kMaxRows = 4;
  static constexpr int vecs(int rows) { return kWidth == 16 ? (rows < 4 ? 4 : 3) : rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  template <int ROWS, int VECS>
  static void compute(const Linear& linear, const uint8_t* inputs, int64_t row, int64_t vec, float* sums) {
    constexpr int64_t kLine = 4 * kLanes, kLines = SIGNED ? kSteps : kSteps / 2;  // bytes; a group's lines in a panel
    constexpr int kVecs = int(kLanes) / kWidth;
    const int64_t num_groups = linear.num_groups(), panel_bytes = linear.panel_bytes();
    const int64_t stride = input_stride(linear.kind, linear.num_inputs);
    const int64_t group_bytes = linear.group_bytes();
    const uint8_t *groups[VECS], *x[ROWS];
    Vec totals[ROWS][VECS];
    for (int v = 0; v < VECS; v++) {
      const uint8_t* panel = linear.data + (vec + v) / kVecs * panel_bytes;
      groups[v] = panel + (vec + v) % kVecs * kWidth * 4;
    }
    for (int r = 0; r < ROWS; r++) {
      x[r] = inputs + (row + r) * stride;
      for (int v = 0; v < VECS; v++) totals[r][v] = zero();
    }
    for (int64_t group = 0; group < num_groups; group++) {
      const int64_t first = group * kGroup, scale_at = num_groups * kGroup + group * 4;
      const int64_t sum_at = scale_at + num_groups * 4;
      Dot<SIGNED> dots[ROWS][VECS];
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) dots[r][v].start(read<int32_t>(x[r] + sum_at));
      const int64_t offset = group * group_bytes, ahead = prefetch_offset(offset, panel_bytes, (VECS - 1) / kVecs);
#pragma GCC unroll 1  // unrolled, the sums of all lines wait in memory
      for (int line = 0; line < kLines; line++) {
        for (int v = 0; v < VECS; v++) {
          const uint8_t* address = groups[v] + offset + line * kLine;
          if (ROWS <= kPrefetchRows && v % kVecs == 0) __builtin_prefetch(address + ahead);
          const Bytes bytes = load_bytes(address);
          if constexpr (SIGNED) {
            const typename Dot<SIGNED>::Weights weights(bytes);
            for (int r = 0; r < ROWS; r++) dots[r][v].add(weights, read<int32_t>(x[r] + first + line * 4));
          } else {
            const typename Dot<SIGNED>::Weights low(low_nibbles(bytes)), high(high_nibbles(bytes));
            for (int r = 0; r < ROWS; r++) {
              dots[r][v].add(low, read<int32_t>(x[r] + first + line * 8));
              dots[r][v].add(high, read<int32_t>(x[r] + first + line * 8 + 4));
            }
          }
        }
      }
      for (int v = 0; v < VECS; v++) {
        const f16* factors = reinterpret_cast<const f16*>(groups[v] + offset + kLines * kLine - half_lane(vec + v));
        const Vec scale = load(factors);
        for (int r = 0; r < ROWS; r++) {
          const Vec factor = scale * broadcast(read<float>(x[r] + scale_at));
          totals[r][v] = fma(dots[r][v].value(), factor, totals[r][v]);
        }
        if constexpr (!SIGNED) {
          const Vec minimum = load(factors + kLanes);
          for (int r = 0; r < ROWS; r++) {
            totals[r][v] = fma(minimum, broadcast(read<float>(x[r] + sum_at)), totals[r][v]);
          }
        }
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECS; v++) store(sums + (r * VECS + v) * kWidth, totals[r][v]);
  }

 private:
  // A lane has 4 bytes of a line, and 2 of the factors after them.
  static int64_t half_lane(int64_t vec) { return vec % (kLanes / kWidth) * kWidth * 2; }

  template <class T>
  static T read(const uint8_t* address) {
    T value;
    memcpy(&value, address, sizeof value);
    return value;
  }
};

}  // namespace

void multiply_grouped(const Linear& linear, const uint8_t* inputs, int64_t num_rows, Range vecs, const Outputs& outputs) {
  if (linear.kind == kInt8) Cover<GroupedTile<true>>{linear, inputs, outputs}.run(num_rows, vecs.begin, vecs.end);
  else Cover<GroupedTile<false>>{linear, inputs, outputs}.run(num_rows, vecs.begin, vecs.end);
}

}  // namespace ss
