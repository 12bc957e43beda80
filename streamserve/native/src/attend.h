// Attention over block tables: keys and values are read where their blocks are. Decodes here, prompts in
// attend_prompts.h, of the same pieces.
//
// What a query sees is cut into tiles of `kTileKeys` positions and parts of `kPartKeys`, both at multiples of their
// size: a score's dims, a tile's weights and the values of its positions are summed in one order, and parts are joined
// in order. So a row's bits depend on its position and on what it sees: not on the rows beside it, the
// number of threads, or whether it is a decode or part of a prompt. All query heads of a group share one read of keys
// and values. (Ideas: Dao et al., FlashAttention, the running softmax; Flash-Decoding, the parts; vLLM's paged
// attention, the block tables.)
//
//   keys (Hkv, num_slots, D), values (Hkv, num_slots, Dv), or rows of kv_int8.h
//   slot of position i: table[i / block_size] * block_size + i % block_size
//
// Numbers are computed in float32, whatever the pools hold; where the processor multiplies bf16, pools of bf16 with queries
// and weights that are rounded to it. A NaN reaches the output.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kv_int8.h"
#include "linear.h"
#include "parallel.h"
#include "status.h"
#include "vec_math.h"

namespace ss {

constexpr int64_t kPartKeys = 512;  // positions of one piece of work
constexpr int64_t kTileKeys = 64;   // positions whose scores are held at once
constexpr int kMostHeads = 4;       // query heads that share a read from the first-level cache

// Whether keys and values of a pool are multiplied in pairs of bf16, summed in float32: queries and weights are rounded to
// bf16 then, as in torch's own attention in bf16.
template <class Kv>
constexpr bool kInPairs = false;

#if defined(__AVX512BF16__)
template <>
inline constexpr bool kInPairs<bf16> = true;

// Pairs travel as vectors of floats, of which only the bits count.
inline Vec add_pairs_of(Vec total, Vec a, Vec b) {
  return {_mm512_dpbf16_ps(total.v, (__m512bh)_mm512_castps_si512(a.v), (__m512bh)_mm512_castps_si512(b.v))};
}
inline Vec load_pairs(const bf16* p, int64_t count) {  // the first `count` of 32 numbers, then zeros
  const __mmask32 kept = count >= 2 * kWidth ? 0xffffffffu : (1u << count) - 1;
  return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(kept, p))};
}
// Store numbers that are not subnormal as bf16, in half of their place, and return what they are then.
inline Vec store_rounded(float* to, Vec x) {
  const __m256i bits = (__m256i)_mm512_cvtneps_pbh(x.v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
// Pairs of a number at `a` and one at `b`, `count` in all; a null pointer stands for zeros.
inline Vec pair_up(const bf16* a, const bf16* b, int64_t count) {
  const __mmask16 kept = count >= kWidth ? 0xffffu : (1u << count) - 1;
  const auto wide = [&](const bf16* p) {
    if (p == nullptr) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(kept, p));
  };
  return {_mm512_castsi512_ps(_mm512_or_si512(wide(a), _mm512_slli_epi32(wide(b), 16)))};
}
#else
inline Vec store_rounded(float*, Vec x) { return x; }  // never called
#endif

// Numbers of a float's size that a vector's copy has where it is multiplied.
template <class Kv>
inline int64_t copy_size(int64_t dim) {
  return kInPairs<Kv> ? round_up(dim, 2 * kWidth) / 2 : padded(dim);
}

// Write a group's queries (rows, padded(dim)) as they are multiplied, (rows, copy_size(dim)).
template <class Kv>
inline void copy_queries(const float* from, int64_t num_rows, int64_t dim, float* to) {
  const int64_t stride = padded(dim), copy_stride = copy_size<Kv>(dim);
  if constexpr (kInPairs<Kv>) {
    for (int64_t row = 0; row < num_rows; row++) {
      bf16* out = reinterpret_cast<bf16*>(to + row * copy_stride);
      for (int64_t d = 0; d < stride; d += kWidth) store(out + d, load(from + row * stride + d));
      if (stride < 2 * copy_stride) store(out + stride, zero());
    }
  } else {
    std::copy_n(from, num_rows * stride, to);
  }
}

// One layer's attention: what does not change from row to row.
template <class Kv>
struct AttentionLayer {
  const Kv* keys;
  const Kv* values;
  int64_t num_slots, num_heads, num_kv_heads, key_dim, value_dim, block_size;
  float scaling;
  int64_t window;      // 0: none
  float softcap;       // 0: none
  const float* sinks;  // (num_heads,), or null

  int64_t group() const { return num_heads / num_kv_heads; }
};

// The first position that the query at `position` sees.
inline int64_t first_key(int64_t position, int64_t window) {
  return window > 0 && position >= window ? position + 1 - window : 0;
}

// Throw std::out_of_range unless every block that the rows read, from position 0 on, is in the pools.
inline void require_blocks(const int64_t* positions, const int64_t* tables, int64_t num_rows, int64_t table_stride,
                           int64_t block_size, int64_t num_slots) {
  require_below(table_stride * block_size, positions, num_rows);
  for (int64_t row = 0; row < num_rows; row++)
    require_below(num_slots / block_size, tables + row * table_stride, positions[row] / block_size + 1);
}

// What a part gives for one query head: a sum of weights relative to exp(most), and of values so weighted.
struct Partial {
  float most, sum;
  float* values;  // (padded(value_dim),)
};

// Memory of one thread: the group's queries as floats and as they are multiplied, a tile's turned keys and its scores, a
// part's outputs and what they stand for.
struct AttentionScratch {
  std::vector<float> read, query, turned, scores, out;
  std::vector<Partial> partials;

  void reserve(int64_t group, int64_t key_dim, int64_t value_dim) {
    read.resize(group * padded(key_dim));
    query.resize(group * padded(key_dim));
    turned.resize(padded(key_dim) * kTileKeys);
    scores.resize(kMostHeads * kTileKeys);
    out.resize(group * padded(value_dim));
    partials.resize(group);
  }
};

// Where a tile's keys and values are: of its positions [begin, end), counted from its first.
template <class Kv>
struct Tile {
  int64_t begin, end;
  const Kv* keys[kTileKeys];
  const Kv* values[kTileKeys];
};

// The tile of the positions [begin, end) of a sequence, which lie between two multiples of kTileKeys.
template <class Kv>
Tile<Kv> tile_at(const AttentionLayer<Kv>& layer, int64_t kv_head, const int64_t* table, int64_t begin, int64_t end) {
  const int64_t origin = begin / kTileKeys * kTileKeys;
  Tile<Kv> tile;
  tile.begin = begin - origin, tile.end = end - origin;
  int64_t block = begin / layer.block_size, offset = begin % layer.block_size;
  for (int64_t k = tile.begin; k < tile.end; k++) {
    const int64_t row = kv_head * layer.num_slots + table[block] * layer.block_size + offset;
    tile.keys[k] = layer.keys + row * row_stride<Kv>(layer.key_dim);
    tile.values[k] = layer.values + row * row_stride<Kv>(layer.value_dim);
    if (++offset == layer.block_size) offset = 0, block++;
  }
  return tile;
}

template <class Kv>
inline void prefetch(const Kv* vector, int64_t dim) {
  for (int64_t byte = 0; byte < dim * int64_t(sizeof(Kv)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(vector) + byte);
}

#if defined(__AVX512BF16__)

// Write sixteen rows of sixteen pairs as columns, kTileKeys apart.
inline void turn_pairs(const __m512i* rows, float* columns) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; i++) {  // b[4 r + i]: columns i, 4 + i, 8 + i, 12 + i of the rows 4 r to 4 r + 3
    const __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), high = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    const __m512i low2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    const __m512i high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    _mm512_storeu_si512(columns + i * kTileKeys, _mm512_shuffle_i32x4(low, low2, 0x88));
    _mm512_storeu_si512(columns + (4 + i) * kTileKeys, _mm512_shuffle_i32x4(high, high2, 0x88));
    _mm512_storeu_si512(columns + (8 + i) * kTileKeys, _mm512_shuffle_i32x4(low, low2, 0xdd));
    _mm512_storeu_si512(columns + (12 + i) * kTileKeys, _mm512_shuffle_i32x4(high, high2, 0xdd));
  }
}

// Turn a tile's keys, so that a lane is a key: (copy_size(dim), kTileKeys) pairs of dims. Positions that the tile does not
// have get its neighbours' keys, in whole vectors.
inline void turn_keys(const Tile<bf16>& tile, int64_t dim, float* columns) {
  for (int64_t k = tile.begin / kWidth * kWidth; k < tile.end; k += kWidth) {
    const bf16* keys[kWidth];
    for (int64_t i = 0; i < kWidth; i++) keys[i] = tile.keys[std::min(std::max(k + i, tile.begin), tile.end - 1)];
    for (int64_t d = 0; d < dim; d += 2 * kWidth) {
      __m512i rows[kWidth];
      for (int i = 0; i < kWidth; i++) rows[i] = _mm512_castps_si512(load_pairs(keys[i] + d, dim - d).v);
      turn_pairs(rows, columns + d / 2 * kTileKeys + k);
    }
  }
}

// Scores (Rows, kTileKeys) of queries (Rows, stride) and `Vecs` vectors of turned keys: a score's pairs are added up in
// their order.
template <int Rows, int Vecs>
inline void score_turned(const float* query, int64_t stride, const float* columns, float* scores) {
  Vec total[Rows][Vecs];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vecs; v++) total[r][v] = zero();
  for (int64_t d = 0; d < stride; d++) {
    Vec key[Vecs];
    for (int v = 0; v < Vecs; v++) key[v] = load(columns + d * kTileKeys + v * kWidth);
    for (int r = 0; r < Rows; r++) {
      const Vec q = broadcast(query[r * stride + d]);
      for (int v = 0; v < Vecs; v++) total[r][v] = add_pairs_of(total[r][v], q, key[v]);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < Vecs; v++) store(scores + r * kTileKeys + v * kWidth, total[r][v]);
}

// The same for the tile's positions before `end`, in whole vectors.
template <int Rows>
inline void score_turned(const float* query, int64_t stride, const float* columns, int64_t end, float* scores) {
  if (end <= kWidth) return score_turned<Rows, 1>(query, stride, columns, scores);
  if (end <= 2 * kWidth) return score_turned<Rows, 2>(query, stride, columns, scores);
  if (end <= 3 * kWidth) return score_turned<Rows, 3>(query, stride, columns, scores);
  score_turned<Rows, 4>(query, stride, columns, scores);
}

#endif

// Scores of `Heads` queries and `Keys` keys. query (Heads, padded(dim)), padded with zeros.
template <int Heads, int Keys, class Kv>
inline void score_keys(const float* query, int64_t dim, const Kv* const* keys, float* scores) {
  const int64_t stride = padded(dim);
  Vec total[Heads][Keys];
  for (int h = 0; h < Heads; h++)
    for (int k = 0; k < Keys; k++) total[h][k] = zero();
  const auto add = [&](int64_t d, const auto& read) {
    Vec key[Keys];
    for (int k = 0; k < Keys; k++) key[k] = read(keys[k]);
    for (int h = 0; h < Heads; h++) {
      const Vec q = load(query + h * stride + d);
      for (int k = 0; k < Keys; k++) total[h][k] = fma(q, key[k], total[h][k]);
    }
  };
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) add(d, [&](const Kv* key) { return load(key + d); });
  if (d < dim) add(d, [&](const Kv* key) { return load_part(key + d, dim - d); });
  for (int h = 0; h < Heads; h++) {
    if constexpr (Keys == 4) {
      const Quad four = sums(total[h][0], total[h][1], total[h][2], total[h][3]);
      memcpy(scores + h * kTileKeys, &four, sizeof four);
    } else {
      for (int k = 0; k < Keys; k++) scores[h * kTileKeys + k] = sum(total[h][k]);
    }
  }
}

// Scores (Heads, kTileKeys) of a tile; its values are on their way meanwhile. `turned`: its keys, where those are
// multiplied in pairs.
template <int Heads, class Kv>
inline void score_tile(const float* query, int64_t key_dim, int64_t value_dim, const Tile<Kv>& tile,
                       [[maybe_unused]] const float* turned, float* scores) {
#if defined(__AVX512BF16__)
  if constexpr (kInPairs<Kv>) return score_turned<Heads>(query, copy_size<Kv>(key_dim), turned, tile.end, scores);
#endif
  int64_t k = tile.begin;
  for (; k + 4 <= tile.end; k += 4) {
    for (int i = 0; i < 4; i++) prefetch(tile.values[k + i], value_dim);
    score_keys<Heads, 4>(query, key_dim, tile.keys + k, scores + k);
  }
  for (; k < tile.end; k++) score_keys<Heads, 1>(query, key_dim, tile.keys + k, scores + k);
}

// How far scores may be above what their weights are relative to: weights are at most exp(kMostRise), and outputs are
// brought to another scale seldom.
constexpr float kMostRise = 8;

// Turn one row's scores of a tile, `num` positions, into weights, and bring `partial` to their scale. Positions that the
// row does not see have the weight 0. Weights are floats, or where they are multiplied in pairs the tile's as bf16.
template <class Kv>
inline void weigh_tile(float* scores, int64_t num, Range seen, float scaling, float softcap, int64_t value_dim,
                       Partial& partial) {
  constexpr int kVecs = kTileKeys / kWidth;
  Vec x[kVecs];
  if (num < kTileKeys) std::fill(scores + num, scores + kTileKeys, 0.0f);
  for (int i = 0; i < kVecs; i++) {
    x[i] = load(scores + i * kWidth) * broadcast(scaling);
    if (softcap > 0) {  // tanh(x) = 1 - 2 / (exp(2 x) + 1)
      const Vec grown = exp(x[i] * broadcast(2 / softcap)) + broadcast(1);
      x[i] = broadcast(softcap) - broadcast(2 * softcap) / grown;
    }
  }
  if (seen.begin > 0 || seen.end < kTileKeys) {
    for (int i = 0; i < kVecs; i++) store(scores + i * kWidth, x[i]);
    std::fill(scores, scores + seen.begin, -kInfinity);
    std::fill(scores + seen.end, scores + kTileKeys, -kInfinity);
    for (int i = 0; i < kVecs; i++) x[i] = load(scores + i * kWidth);
  }
  Vec high = x[0];
  for (int i = 1; i < kVecs; i++) high = max(high, x[i]);
  if (exceeds(high, partial.most + kMostRise)) {
    const float most = largest(high);
    const Vec shrink = exp(broadcast(partial.most) - broadcast(most));
    partial.sum *= first(shrink);
    map(partial.values, partial.values, padded(value_dim), [&](Vec value) { return value * shrink; });
    partial.most = most;
  }
  Vec total = zero();
  for (int i = 0; i < kVecs; i++) {
    Vec weight = x[i] - broadcast(partial.most);
    if constexpr (kInPairs<Kv>) weight = store_rounded(scores + i * kWidth / 2, rough_exp(weight));  // what is multiplied
    else store(scores + i * kWidth, weight = exp(weight));                                           // is summed
    total = total + weight;
  }
  partial.sum += sum(total);
}

// Add a tile's weighted values to `Heads` outputs (Heads, padded(dim)): `Wide` vectors at a time, held in registers.
template <int Heads, int Wide, class Kv>
inline void add_columns(const float* weights, const Tile<Kv>& tile, int64_t d, int64_t stride, float* out) {
  Vec total[Heads][Wide];
  for (int h = 0; h < Heads; h++)
    for (int w = 0; w < Wide; w++) total[h][w] = load(out + h * stride + d + w * kWidth);
  for (int64_t k = tile.begin; k < tile.end; k++) {
    Vec value[Wide];
    for (int w = 0; w < Wide; w++) value[w] = load(tile.values[k] + d + w * kWidth);
    for (int h = 0; h < Heads; h++) {
      const Vec weight = broadcast(weights[h * kTileKeys + k]);
      for (int w = 0; w < Wide; w++) total[h][w] = fma(weight, value[w], total[h][w]);
    }
  }
  for (int h = 0; h < Heads; h++)
    for (int w = 0; w < Wide; w++) store(out + h * stride + d + w * kWidth, total[h][w]);
}

#if defined(__AVX512BF16__)

// Add a tile's values by pairs of positions; `weights` (Heads, kTileKeys) hold bf16, two in a float's place.
// `value(pair, d)`: the pairs of kWidth dims from `d` on.
template <int Heads, int Wide, class Value>
inline void add_columns_of_pairs(const float* weights, int64_t begin, int64_t end, int64_t d, int64_t stride,
                                 const Value& value, float* out) {
  Vec total[Heads][Wide];
  for (int h = 0; h < Heads; h++)
    for (int w = 0; w < Wide; w++) total[h][w] = load(out + h * stride + d + w * kWidth);
  for (int64_t pair = begin; pair < end; pair++) {
    Vec values[Wide];
    for (int w = 0; w < Wide; w++) values[w] = value(pair, d + w * kWidth);
    for (int h = 0; h < Heads; h++) {
      const Vec weight = broadcast(weights[h * kTileKeys + pair]);
      for (int w = 0; w < Wide; w++) total[h][w] = add_pairs_of(total[h][w], weight, values[w]);
    }
  }
  for (int h = 0; h < Heads; h++)
    for (int w = 0; w < Wide; w++) store(out + h * stride + d + w * kWidth, total[h][w]);
}

template <int Heads, class Value>
inline void add_pairs_of_tile(const float* weights, int64_t begin, int64_t end, int64_t dim, const Value& value,
                              float* out) {
  constexpr int kWide = 4;
  const int64_t stride = padded(dim);
  int64_t d = 0;
  for (; d + kWide * kWidth <= dim; d += kWide * kWidth)
    add_columns_of_pairs<Heads, kWide>(weights, begin, end, d, stride, value, out);
  for (; d < dim; d += kWidth) add_columns_of_pairs<Heads, 1>(weights, begin, end, d, stride, value, out);
}

#endif

template <int Heads, class Kv>
inline void add_tile(const float* weights, const Tile<Kv>& tile, int64_t dim, float* out) {
  constexpr int kWide = kWidth == 16 ? 4 : 2;
  const int64_t stride = padded(dim);
  int64_t d = 0;
#if defined(__AVX512BF16__)
  if constexpr (kInPairs<Kv>) {
    const auto value = [&](int64_t pair, int64_t place) {
      const int64_t k = 2 * pair;
      return pair_up(k >= tile.begin ? tile.values[k] + place : nullptr,
                     k + 1 < tile.end ? tile.values[k + 1] + place : nullptr, dim - place);
    };
    return add_pairs_of_tile<Heads>(weights, tile.begin / 2, (tile.end + 1) / 2, dim, value, out);
  }
#endif
  for (; d + kWide * kWidth <= dim; d += kWide * kWidth) add_columns<Heads, kWide>(weights, tile, d, stride, out);
  for (; d + kWidth <= dim; d += kWidth) add_columns<Heads, 1>(weights, tile, d, stride, out);
  if (d == dim) return;
  for (int h = 0; h < Heads; h++) {
    Vec total = load(out + h * stride + d);
    for (int64_t k = tile.begin; k < tile.end; k++)
      total = fma(broadcast(weights[h * kTileKeys + k]), load_part(tile.values[k] + d, dim - d), total);
    store(out + h * stride + d, total);
  }
}

// Attend with `Heads` heads, from `head` of the group on, to one tile.
template <int Heads, class Kv>
inline void attend_tile(const AttentionLayer<Kv>& layer, AttentionScratch& scratch, int64_t head,
                        const Tile<Kv>& tile) {
  float* scores = scratch.scores.data();
  const float* query = scratch.query.data() + head * copy_size<Kv>(layer.key_dim);
  score_tile<Heads>(query, layer.key_dim, layer.value_dim, tile, scratch.turned.data(), scores);
  for (int h = 0; h < Heads; h++) {
    float* own = scores + h * kTileKeys;
    apply_scales(own, tile.keys, tile.begin, tile.end, layer.key_dim);
    weigh_tile<Kv>(own, tile.end, {tile.begin, tile.end}, layer.scaling, layer.softcap, layer.value_dim,
               scratch.partials[head + h]);
    apply_scales(own, tile.values, tile.begin, tile.end, layer.value_dim);
  }
  add_tile<Heads>(scores, tile, layer.value_dim, scratch.partials[head].values);
}

// Attend with a group of query heads, which are in `scratch`, to positions [begin, end) of one sequence.
template <class Kv>
void attend_part(const AttentionLayer<Kv>& layer, AttentionScratch& scratch, int64_t kv_head, const int64_t* table,
                 int64_t begin, int64_t end) {
  const int64_t group = layer.group(), stride = padded(layer.value_dim);
  std::fill(scratch.out.begin(), scratch.out.end(), 0.0f);
  for (int64_t h = 0; h < group; h++) scratch.partials[h] = {-kInfinity, 0, scratch.out.data() + h * stride};
  for (int64_t position = begin; position < end;) {
    const int64_t stop = std::min(end, round_up(position + 1, kTileKeys));
    const Tile<Kv> tile = tile_at(layer, kv_head, table, position, stop);
    position = stop;
#if defined(__AVX512BF16__)
    if constexpr (kInPairs<Kv>) {
      for (int64_t k = tile.begin; k < tile.end; k++) prefetch(tile.values[k], layer.value_dim);
      turn_keys(tile, layer.key_dim, scratch.turned.data());
    }
#endif
    int64_t head = 0;
    for (; head + kMostHeads <= group; head += kMostHeads) attend_tile<kMostHeads>(layer, scratch, head, tile);
    if (group - head == 3) attend_tile<3>(layer, scratch, head, tile);
    if (group - head == 2) attend_tile<2>(layer, scratch, head, tile);
    if (group - head == 1) attend_tile<1>(layer, scratch, head, tile);
  }
}

// Join the result of the part after those in `whole` to them.
inline void join_part(Partial& whole, const Partial& part, int64_t value_dim) {
  const float most = std::max(whole.most, part.most);
  const float before = std::exp(whole.most - most), scale = std::exp(part.most - most);
  whole.most = most;
  whole.sum = whole.sum * before + part.sum * scale;
  for (int64_t d = 0; d < padded(value_dim); d += kWidth)
    store(whole.values + d, fma(load(part.values + d), broadcast(scale), load(whole.values + d) * broadcast(before)));
}

// What weighted values are multiplied by. A sink takes part in the sum, and has no value.
inline float normaliser(const Partial& partial, const float* sinks, int64_t head) {
  if (!sinks) return 1 / partial.sum;
  const float most = std::max(partial.most, sinks[head]), shrink = std::exp(partial.most - most);
  return shrink / (partial.sum * shrink + std::exp(sinks[head] - most));
}

// The (row, part) pairs of a batch of decodes, the same in every layer of one window.
struct DecodePieces {
  std::vector<int64_t> row_of, first_of_row;  // of a piece; (num_rows + 1,)

  void plan(const int64_t* positions, int64_t num_rows, int64_t window) {
    row_of.clear();
    first_of_row.assign(1, 0);
    for (int64_t row = 0; row < num_rows; row++) {
      const int64_t parts = positions[row] / kPartKeys - first_key(positions[row], window) / kPartKeys + 1;
      row_of.insert(row_of.end(), parts, row);
      first_of_row.push_back(int64_t(row_of.size()));
    }
  }
  int64_t size() const { return int64_t(row_of.size()); }
  int64_t num_rows() const { return int64_t(first_of_row.size()) - 1; }
  int64_t num_parts(int64_t row) const { return first_of_row[row + 1] - first_of_row[row]; }
};

// A batch of decodes in one layer. Rows of several parts leave them in `partials`, to be joined when all are there.
//
// `queries.read(row, kv_head, is_newest, to)` gives a group's queries (group, padded(key_dim)), padded with zeros. It is
// called with `is_newest` before the part that ends with the row's own position is read, and may store its keys there.
template <class Kv, class Queries, class T>
struct DecodeAttention {
  AttentionLayer<Kv> layer;
  const DecodePieces& pieces;
  const int64_t* positions;  // (num_rows,)
  const int64_t* tables;     // (num_rows, table_stride)
  int64_t table_stride;
  const Queries& queries;
  T* out;  // rows of num_heads * value_dim, out_stride apart
  int64_t out_stride;
  float* partials;  // (pieces, num_heads, partial_size()), null where no row has several parts

  int64_t num_items() const { return pieces.size() * layer.num_kv_heads; }
  bool must_join() const { return pieces.size() > pieces.num_rows(); }
  int64_t partial_size() const { return padded(layer.value_dim) + 2; }
  float* partial(int64_t piece, int64_t head) const {
    return partials + (piece * layer.num_heads + head) * partial_size();
  }

  // Compute item `index` of num_items().
  void run(int64_t index, AttentionScratch& scratch) const {
    const int64_t piece = index / layer.num_kv_heads, kv_head = index % layer.num_kv_heads, group = layer.group();
    const int64_t row = pieces.row_of[piece], part = piece - pieces.first_of_row[row];
    scratch.reserve(group, layer.key_dim, layer.value_dim);
    queries.read(row, kv_head, part + 1 == pieces.num_parts(row), scratch.read.data());
    copy_queries<Kv>(scratch.read.data(), group, layer.key_dim, scratch.query.data());
    const int64_t first = first_key(positions[row], layer.window);
    const int64_t origin = (first / kPartKeys + part) * kPartKeys;
    attend_part(layer, scratch, kv_head, tables + row * table_stride, std::max(first, origin),
                std::min(positions[row] + 1, origin + kPartKeys));
    for (int64_t h = 0; h < group; h++) write(piece, row, kv_head * group + h, scratch.partials[h]);
  }

  // Join the parts of one head of a row, in order.
  void join(int64_t row, int64_t head) const {
    const int64_t first = pieces.first_of_row[row], num = pieces.num_parts(row);
    if (num == 1) return;
    Partial whole = kept(first, head);
    for (int64_t i = 1; i < num; i++) join_part(whole, kept(first + i, head), layer.value_dim);
    store_normal(row, head, whole);
  }

 private:
  void write(int64_t piece, int64_t row, int64_t head, const Partial& found) const {
    if (pieces.num_parts(row) == 1) return store_normal(row, head, found);
    float* to = partial(piece, head);
    to[0] = found.most;
    to[1] = found.sum;
    std::copy_n(found.values, padded(layer.value_dim), to + 2);
  }

  Partial kept(int64_t piece, int64_t head) const {
    float* from = partial(piece, head);
    return {from[0], from[1], from + 2};
  }

  void store_normal(int64_t row, int64_t head, const Partial& found) const {
    const Vec factor = broadcast(normaliser(found, layer.sinks, head));
    map(out + row * out_stride + head * layer.value_dim, found.values, layer.value_dim, [&](Vec x) { return x * factor; });
  }
};

}  // namespace ss
