// Attention of prompts over block tables: several tokens of a sequence, whose keys and values are in the pools.
//
// A piece of work is some neighbouring positions of one sequence, with the heads that share a key/value head:
//
//     rows of a piece   [position 0: heads 0 .. G-1 | position 1: heads 0 .. G-1 | ...]
//
// It goes through the keys that any of its rows sees, tile by tile. A tile's keys are turned, so that a lane is a key, and
// a score's dims are added up in the order in which decodes add theirs (`sum` of simd.h; pairs of bf16 in their own
// order). What follows is done by what decodes do it with. So a row's numbers are bitwise those of a decode at its
// position, wherever a chunk begins and ends.
#pragma once

#include "attend.h"

namespace ss {

constexpr int64_t kPieceRows = 128;  // more read keys less often, and leave less work to share among threads
constexpr int kBlockVecs = 2;        // vectors of keys whose scores are summed together

// Rows that go through a tile together: pairs need no room for halves of sums.
template <class Kv>
constexpr int kBlockRows = kInPairs<Kv> ? 6 : 4;

// Neighbouring rows of a prompt; `start` is the position of the first.
struct PromptPiece {
  int64_t first_row, num_rows, start;
  const int64_t* table;
};

// Cut a prompt into pieces, for layers with `group` query heads a key/value head. Its last piece comes first: it sees
// most, and threads that find no more work wait for short pieces.
inline void cut_prompt(const PromptPiece& prompt, int64_t group, std::vector<PromptPiece>& pieces) {
  const int64_t size = std::max<int64_t>(1, kPieceRows / group);
  for (int64_t row = (prompt.num_rows - 1) / size * size; row >= 0; row -= size)
    pieces.push_back(
        {prompt.first_row + row, std::min(size, prompt.num_rows - row), prompt.start + row, prompt.table});
}

// Memory of one thread. Rows are rounded up to whole blocks.
struct PromptScratch {
  std::vector<float> read, query, scores, keys, values, row, part_values, whole_values;
  std::vector<Partial> part, whole;

  void reserve(int64_t num_rows, int64_t block_rows, int64_t group, int64_t key_dim, int64_t value_dim) {
    read.resize(group * padded(key_dim));
    query.resize(num_rows * padded(key_dim));
    scores.resize(block_rows * kTileKeys);
    keys.resize(padded(key_dim) * kTileKeys);
    row.resize(4 * padded(key_dim));
    values.resize(kTileKeys * padded(value_dim));
    part_values.resize(num_rows * padded(value_dim));
    whole_values.resize(num_rows * padded(value_dim));
    part.resize(num_rows);
    whole.resize(num_rows);
  }
};

// Sums of a block's products over the dims that leave `first` when divided by Step, for each row and key.
struct BlockSums {
  Vec at[4][kBlockVecs];
};

// query (4, stride), keys (stride, kTileKeys). Halves are added in the order of `sum`: dims that are kWidth
// apart, then lanes l and l + kWidth / 2, and so on.
template <int Step>
__attribute__((always_inline)) inline BlockSums sum_dims(const float* query, int64_t stride, const float* keys,
                                                         int64_t first) {
  BlockSums total;
  if constexpr (Step == kWidth) {
    for (auto& row : total.at)
      for (Vec& vec : row) vec = zero();
    for (int64_t d = first; d < stride; d += kWidth) {
      Vec key[kBlockVecs];
      for (int v = 0; v < kBlockVecs; v++) key[v] = load(keys + d * kTileKeys + v * kWidth);
      for (int r = 0; r < 4; r++) {
        const Vec q = broadcast(query[r * stride + d]);
        for (int v = 0; v < kBlockVecs; v++) total.at[r][v] = fma(q, key[v], total.at[r][v]);
      }
    }
  } else {
    total = sum_dims<2 * Step>(query, stride, keys, first);
    const BlockSums other = sum_dims<2 * Step>(query, stride, keys, first + Step);
    for (int r = 0; r < 4; r++)
      for (int v = 0; v < kBlockVecs; v++) total.at[r][v] = total.at[r][v] + other.at[r][v];
  }
  return total;
}

// Write four rows (4, stride) as columns, kTileKeys apart.
inline void turn_rows(const float* rows, int64_t stride, float* columns) {
  for (int64_t d = 0; d < stride; d += 4) {
    Quad a, b, c, e;
    memcpy(&a, rows + d, 16), memcpy(&b, rows + stride + d, 16);
    memcpy(&c, rows + 2 * stride + d, 16), memcpy(&e, rows + 3 * stride + d, 16);
    const Quad low_ab{a[0], b[0], a[1], b[1]}, high_ab{a[2], b[2], a[3], b[3]};
    const Quad low_ce{c[0], e[0], c[1], e[1]}, high_ce{c[2], e[2], c[3], e[3]};
    const Quad turned[4] = {{low_ab[0], low_ab[1], low_ce[0], low_ce[1]},
                            {low_ab[2], low_ab[3], low_ce[2], low_ce[3]},
                            {high_ab[0], high_ab[1], high_ce[0], high_ce[1]},
                            {high_ab[2], high_ab[3], high_ce[2], high_ce[3]}};
    for (int i = 0; i < 4; i++) memcpy(columns + (d + i) * kTileKeys, &turned[i], 16);
  }
}

// A batch of prompts in one layer. `queries.read(row, kv_head, to)` gives a group's queries (group, padded(key_dim)),
// padded with zeros.
template <class Kv, class Queries, class T>
struct PromptAttention {
  AttentionLayer<Kv> layer;
  const std::vector<PromptPiece>& pieces;
  const Queries& queries;
  T* out;  // rows of num_heads * value_dim, out_stride apart
  int64_t out_stride;

  int64_t num_items() const { return int64_t(pieces.size()) * layer.num_kv_heads; }

  // Compute item `index` of num_items().
  void run(int64_t index, PromptScratch& scratch) const {
    const PromptPiece& piece = pieces[index / layer.num_kv_heads];
    const int64_t kv_head = index % layer.num_kv_heads, group = layer.group();
    const int64_t num_rows = round_up(piece.num_rows * group, kBlockRows<Kv>);
    begin(piece, kv_head, num_rows, scratch);
    const int64_t last = piece.start + piece.num_rows;
    for (int64_t position = first_key(piece.start, layer.window); position < last;) {
      if (position % kPartKeys == 0) join_parts(scratch, num_rows);
      const int64_t stop = std::min(last, round_up(position + 1, kTileKeys));
      attend_tile(piece, kv_head, num_rows, position, stop, scratch);
      position = stop;
    }
    for (int64_t row = 0; row < piece.num_rows * group; row++) {
      const int64_t head = kv_head * group + row % group;
      store_row(piece.first_row + row / group, head, scratch.whole[row], scratch.part[row]);
    }
  }

 private:
  static bool is_empty(const Partial& partial) { return partial.most == -kInfinity; }

  void begin(const PromptPiece& piece, int64_t kv_head, int64_t num_rows, PromptScratch& scratch) const {
    const int64_t group = layer.group(), stride = copy_size<Kv>(layer.key_dim);
    scratch.reserve(num_rows, kBlockRows<Kv>, group, layer.key_dim, layer.value_dim);
    for (int64_t i = 0; i < piece.num_rows; i++) {
      queries.read(piece.first_row + i, kv_head, scratch.read.data());
      copy_queries<Kv>(scratch.read.data(), group, layer.key_dim, scratch.query.data() + i * group * stride);
    }
    std::fill(scratch.query.begin() + piece.num_rows * group * stride, scratch.query.end(), 0.0f);
    for (int64_t row = 0; row < num_rows; row++)
      scratch.whole[row] = {-kInfinity, 0, scratch.whole_values.data() + row * padded(layer.value_dim)};
    begin_part(scratch, num_rows);
  }

  void begin_part(PromptScratch& scratch, int64_t num_rows) const {
    std::fill(scratch.part_values.begin(), scratch.part_values.end(), 0.0f);
    for (int64_t row = 0; row < num_rows; row++)
      scratch.part[row] = {-kInfinity, 0, scratch.part_values.data() + row * padded(layer.value_dim)};
  }

  // Join what the rows saw of a part to what they saw before it.
  void join_parts(PromptScratch& scratch, int64_t num_rows) const {
    for (int64_t row = 0; row < num_rows; row++) join(scratch.whole[row], scratch.part[row]);
    begin_part(scratch, num_rows);
  }

  void join(Partial& whole, const Partial& part) const {
    if (is_empty(part)) return;
    if (!is_empty(whole)) return join_part(whole, part, layer.value_dim);
    std::copy_n(part.values, padded(layer.value_dim), whole.values);
    whole.most = part.most, whole.sum = part.sum;
  }

  // Attend with all rows to the positions [begin, end), which lie between two multiples of kTileKeys.
  void attend_tile(const PromptPiece& piece, int64_t kv_head, int64_t num_rows, int64_t begin, int64_t end,
                   PromptScratch& scratch) const {
    const Tile<Kv> from = tile_at(layer, kv_head, piece.table, begin, end);
    const Tile<float> tile = copy_tile(from, scratch);
    const int64_t group = layer.group(), stride = copy_size<Kv>(layer.key_dim), origin = end - tile.end;
    float* scores = scratch.scores.data();
    // Rows before `first` see nothing of the tile: it comes after them.
    const int64_t first = std::max<int64_t>(0, (begin - piece.start) * group) / kBlockRows<Kv> * kBlockRows<Kv>;
    for (int64_t row = first; row < num_rows; row += kBlockRows<Kv>) {
      // No row of the block sees more of the tile than its last.
      const int64_t most = std::min(piece.start + (row + kBlockRows<Kv> - 1) / group + 1 - origin, tile.end);
      score_block(scratch.query.data() + row * stride, stride, most, scratch);
      for (int r = 0; r < kBlockRows<Kv>; r++) {
        const int64_t position = piece.start + (row + r) / group;
        const Range seen{std::max(first_key(position, layer.window) - origin, tile.begin),
                         std::min(position + 1 - origin, tile.end)};
        float* own = scores + r * kTileKeys;
        if (seen.begin >= seen.end) {
          std::fill_n(own, kTileKeys, 0.0f);
          continue;
        }
        apply_scales(own, from.keys, tile.begin, tile.end, layer.key_dim);
        weigh_tile<Kv>(own, most, seen, layer.scaling, layer.softcap, layer.value_dim, scratch.part[row + r]);
        apply_scales(own, from.values, tile.begin, tile.end, layer.value_dim);
      }
      add_values(scores, tile, most, scratch.part[row].values, scratch);
    }
  }

  // Scores of a block's rows for a tile's positions before `end`, in whole vectors.
  void score_block(const float* query, int64_t stride, int64_t end, PromptScratch& scratch) const {
#if defined(__AVX512BF16__)
    if constexpr (kInPairs<Kv>)
      return score_turned<kBlockRows<Kv>>(query, stride, scratch.keys.data(), end, scratch.scores.data());
#endif
    for (int64_t k = 0; k < end; k += kBlockVecs * kWidth) {
      const BlockSums sums = sum_dims<1>(query, stride, scratch.keys.data() + k, 0);
      for (int r = 0; r < 4; r++)
        for (int v = 0; v < kBlockVecs; v++) store(scratch.scores.data() + r * kTileKeys + k + v * kWidth, sums.at[r][v]);
    }
  }

  // Add the weighted values of a copied tile's positions before `end` to a block's outputs.
  void add_values(const float* weights, const Tile<float>& tile, [[maybe_unused]] int64_t end, float* out,
                  [[maybe_unused]] const PromptScratch& scratch) const {
    const int64_t stride = padded(layer.value_dim);
#if defined(__AVX512BF16__)
    if constexpr (kInPairs<Kv>) {
      const float* values = scratch.values.data();
      const auto value = [&](int64_t pair, int64_t d) { return load(values + pair * stride + d); };
      return add_pairs_of_tile<kBlockRows<Kv>>(weights, tile.begin / 2, (end + 1) / 2, stride, value, out);
    }
#endif
    add_tile<kBlockRows<Kv>>(weights, tile, stride, out);
  }

  // Copy a tile as it is multiplied: its keys turned, (copy_size(key_dim), kTileKeys); its values as floats, or by pairs
  // of positions, (kTileKeys / 2, padded(value_dim)).
  Tile<float> copy_tile(const Tile<Kv>& from, PromptScratch& scratch) const {
    [[maybe_unused]] const int64_t stride = padded(layer.key_dim);
    const int64_t value_stride = padded(layer.value_dim);
    Tile<float> tile;
    tile.begin = from.begin, tile.end = from.end;
#if defined(__AVX512BF16__)
    if constexpr (kInPairs<Kv>) {
      turn_keys(from, layer.key_dim, scratch.keys.data());
      for (int64_t k = from.begin / 2 * 2; k < from.end; k += 2) {
        const Kv *even = k < from.begin ? nullptr : from.values[k], *odd = k + 1 < from.end ? from.values[k + 1] : nullptr;
        for (int64_t d = 0; d < layer.value_dim; d += kWidth)
          store(scratch.values.data() + k / 2 * value_stride + d,
                pair_up(even ? even + d : even, odd ? odd + d : odd, layer.value_dim - d));
      }
      return tile;
    }
#endif
    for (int64_t k = from.begin / 4 * 4; k < from.end; k += 4) {
      for (int64_t i = 0; i < 4; i++) {
        const Kv* key = from.keys[std::min(std::max(k + i, from.begin), from.end - 1)];
        copy_padded(scratch.row.data() + i * stride, key, layer.key_dim);
      }
      turn_rows(scratch.row.data(), stride, scratch.keys.data() + k);
    }
    for (int64_t k = from.begin; k < from.end; k++) {
      float* to = scratch.values.data() + k * value_stride;
      copy_padded(to, from.values[k], layer.value_dim);
      tile.values[k] = to;
    }
    return tile;
  }

  void store_row(int64_t row, int64_t head, Partial& whole, const Partial& part) const {
    const Partial* found = &part;
    if (!is_empty(whole)) {
      join(whole, part);
      found = &whole;
    }
    const Vec factor = broadcast(normaliser(*found, layer.sinks, head));
    map(out + row * out_stride + head * layer.value_dim, found->values, layer.value_dim,
        [&](Vec x) { return x * factor; });
  }
};

}  // namespace ss
