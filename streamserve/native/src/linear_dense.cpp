// Tiles of float weights: fp32, bf16 and fp16, summed in fp32. See linear.h.
#include "linear_kinds.h"
#include "tiles.h"

namespace ss {
namespace {

// How weights of W are read: `kInputs` inputs at a time, in `kParts` parts that are multiplied one after another.
template <class W>
struct Reader {
  static constexpr int kInputs = 1, kParts = 1;
  using Input = float;
  using Weights = Vec;

  static Weights read(const W* weights, int) { return load(weights); }
  static Vec input(const float* x, int) { return broadcast(x[0]); }
  static Vec add(Vec sum, Weights weights, Vec x) { return fma(weights, x, sum); }
};

#if defined(__AVX512BF16__)

template <>
struct Reader<bf16> {
  static constexpr int kInputs = 2, kParts = 1;
  using Input = bf16;
  using Weights = __m512bh;

  static Weights read(const bf16* pairs, int) { return (__m512bh)_mm512_loadu_si512(pairs); }
  static __m512bh input(const bf16* x, int) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Vec add(Vec sum, Weights weights, __m512bh x) { return {_mm512_dpbf16_ps(sum.v, weights, x)}; }
};

#else

// Of each 32 bits the low half is the first input's weight, the high half the second's.
template <>
struct Reader<bf16> {
  static constexpr int kInputs = 2, kParts = 2;
  using Input = float;
  using Weights = Vec;

  static Weights read(const bf16* pairs, int part) {
#if defined(__AVX512F__)
    const __m512i bits = _mm512_loadu_si512(pairs);
    const __m512i high = part ? _mm512_and_si512(bits, _mm512_set1_epi32(-65536)) : _mm512_slli_epi32(bits, 16);
    return {_mm512_castsi512_ps(high)};
#elif defined(__AVX2__)
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    const __m256i high = part ? _mm256_and_si256(bits, _mm256_set1_epi32(-65536)) : _mm256_slli_epi32(bits, 16);
    return {_mm256_castsi256_ps(high)};
#else
    Vec weights = zero();
    for (int i = 0; i < kWidth; i++) weights.v[i] = to_float(pairs[2 * i + part]);
    return weights;
#endif
  }
  static Vec input(const float* x, int part) { return broadcast(x[part]); }
  static Vec add(Vec sum, Weights weights, Vec x) { return fma(weights, x, sum); }
};

#endif

template <class W>
struct DenseTile {
  static constexpr int kMaxRows = kWidth == 16 ? 8 : Reader<W>::kParts == 2 ? 5 : 6;
  static constexpr int vecs(int rows) {
    if (kWidth == 16) return rows < 7 ? 4 : 3;
    return rows == 1 ? 8 : rows == 2 ? 4 : rows == 3 ? 3 : 2;
  }

  template <int ROWS, int VECS>
  static void compute(const Linear& linear, const uint8_t* inputs, int64_t row, int64_t vec, float* sums) {
    using Read = Reader<W>;
    using Input = typename Read::Input;
    constexpr int kInputs = Read::kInputs, kVecs = int(kLanes) / kWidth;
    const int64_t stride = input_stride(linear.kind, linear.num_inputs), panel_bytes = linear.panel_bytes();
    const W* weights[VECS];
    const Input* x[ROWS];
    Vec totals[ROWS][VECS];
    for (int v = 0; v < VECS; v++) {
      const uint8_t* panel = linear.data + (vec + v) / kVecs * panel_bytes;
      weights[v] = reinterpret_cast<const W*>(panel) + (vec + v) % kVecs * kWidth * kInputs;
    }
    for (int r = 0; r < ROWS; r++) {
      x[r] = reinterpret_cast<const Input*>(inputs + (row + r) * stride);
      for (int v = 0; v < VECS; v++) totals[r][v] = zero();
    }
    for (int64_t i = 0; i < linear.num_inputs; i += kInputs) {
      const int64_t ahead = prefetch_offset(i * kLanes * int64_t(sizeof(W)), panel_bytes, (VECS - 1) / kVecs);
      for (int part = 0; part < Read::kParts; part++) {
        typename Read::Weights loaded[VECS];
        for (int v = 0; v < VECS; v++) {
          if (ROWS <= kPrefetchRows && v % kVecs == 0 && part == 0)
            __builtin_prefetch(reinterpret_cast<const uint8_t*>(weights[v] + i * kLanes) + ahead);
          loaded[v] = Read::read(weights[v] + i * kLanes, part);
        }
        for (int r = 0; r < ROWS; r++) {
          const auto input = Read::input(x[r] + i, part);
          for (int v = 0; v < VECS; v++) totals[r][v] = Read::add(totals[r][v], loaded[v], input);
        }
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECS; v++) store(sums + (r * VECS + v) * kWidth, totals[r][v]);
  }
};

template <class W>
void run(const Linear& linear, const uint8_t* inputs, int64_t num_rows, Range vecs, const Outputs& outputs) {
  Cover<DenseTile<W>>{linear, inputs, outputs}.run(num_rows, vecs.begin, vecs.end);
}

}  // namespace

void multiply_dense(const Linear& linear, const uint8_t* inputs, int64_t num_rows, Range vecs, const Outputs& outputs) {
  if (linear.kind == kDense32) run<float>(linear, inputs, num_rows, vecs, outputs);
  else if (linear.kind == kDenseBf16) run<bf16>(linear, inputs, num_rows, vecs, outputs);
  else run<f16>(linear, inputs, num_rows, vecs, outputs);
}

}  // namespace ss
