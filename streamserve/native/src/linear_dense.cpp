// Tiles of float weights: fp32, bf16 and fp16, summed in fp32. See linear.h.
#include "linear_kinds.h"
#include "tiles.h"

namespace ss {
namespace {

// The weights of kWidth outputs for one step of the loop over inputs, and their products: kInputs inputs at a time.
template <class W>
struct Step {
  static constexpr int kInputs = 1;
  using Input = float;
  Vec w;

  explicit Step(const W* weights) : w(load(weights)) {}
  Vec add(Vec sum, const float* x) const { return fma(w, broadcast(x[0]), sum); }
};

#if defined(__AVX512BF16__)

template <>
struct Step<bf16> {
  static constexpr int kInputs = 2;
  using Input = bf16;
  __m512bh w;

  explicit Step(const bf16* weights) : w((__m512bh)_mm512_loadu_si512(weights)) {}
  Vec add(Vec sum, const bf16* x) const {
    int32_t pair;
    memcpy(&pair, x, 4);
    return {_mm512_dpbf16_ps(sum.v, w, (__m512bh)_mm512_set1_epi32(pair))};
  }
};

#else

// Of each 32 bits the low half is the first input's weight, the high half the second's.
template <>
struct Step<bf16> {
  static constexpr int kInputs = 2;
  using Input = float;
  Vec first, second;

  explicit Step(const bf16* pairs) {
#if defined(__AVX512F__)
    const __m512i bits = _mm512_loadu_si512(pairs);
    first.v = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    second.v = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000))));
#elif defined(__AVX2__)
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
    first.v = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    second.v = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000))));
#else
    for (int i = 0; i < kWidth; i++) first.v[i] = to_float(pairs[2 * i]), second.v[i] = to_float(pairs[2 * i + 1]);
#endif
  }
  Vec add(Vec sum, const float* x) const { return fma(second, broadcast(x[1]), fma(first, broadcast(x[0]), sum)); }
};

#endif

template <class W>
struct DenseTile {
  static constexpr int kMaxRows = kWidth == 16 ? 8 : 6;
  static constexpr int vecs(int rows) { return kWidth == 16 ? (rows < 7 ? 4 : 3) : rows == 1 ? 8 : 12 / rows; }

  template <int ROWS, int VECS>
  static void compute(const Linear& linear, const uint8_t* inputs, int64_t row, int64_t vec, float* sums) {
    using Input = typename Step<W>::Input;
    constexpr int kInputs = Step<W>::kInputs, kVecs = int(kLanes) / kWidth;
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
      for (int v = 0; v < VECS; v++) {
        const Step<W> step(weights[v] + i * kLanes);
        for (int r = 0; r < ROWS; r++) totals[r][v] = step.add(totals[r][v], x[r] + i);
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
