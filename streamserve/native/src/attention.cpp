// The C doors of attention over block tables: decodes and prompts of one layer, and the writing of keys and values.
#include <atomic>

#include "abi.h"
#include "attend.h"
#include "attend_prompts.h"
#include "status.h"

using namespace ss;

namespace {

// Multiplications below which a second thread costs more than it brings.
constexpr int64_t kWorthAThread = 1 << 16;

// Queries as Python has them.
template <class T, class Call>
struct StridedQueries {
  const Call& call;

  void read(int64_t row, int64_t kv_head, float* to) const {
    const int64_t dim = call.key_dim, group = call.num_heads / call.num_kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++, to += padded(dim))
      copy_padded(to, static_cast<const T*>(call.query) + row * call.query_row_stride + head * call.query_head_stride,
                  dim);
  }
  void read(int64_t row, int64_t kv_head, bool, float* to) const { read(row, kv_head, to); }
};

template <class Kv, class Call>
AttentionLayer<Kv> layer_of(const Call& call) {
  return {static_cast<const Kv*>(call.keys),
          static_cast<const Kv*>(call.values),
          call.num_slots,
          call.num_heads,
          call.num_kv_heads,
          call.key_dim,
          call.value_dim,
          call.block_size,
          call.scaling,
          call.window,
          call.softcap,
          call.sinks};
}

template <class T, class Kv>
void attend_decodes(const DecodeCall& call, int64_t num_threads) {
  require_blocks(call.positions, call.tables, call.num_rows, call.table_stride, call.block_size, call.num_slots);
  DecodePieces pieces;
  pieces.plan(call.positions, call.num_rows, call.window);
  using Queries = StridedQueries<T, DecodeCall>;
  const Queries queries{call};
  DecodeAttention<Kv, Queries, T> attention{layer_of<Kv>(call),
                                            pieces,
                                            call.positions,
                                            call.tables,
                                            call.table_stride,
                                            queries,
                                            static_cast<T*>(call.out),
                                            call.num_heads * call.value_dim,
                                            nullptr};
  std::vector<float> partials;
  if (attention.must_join()) partials.resize(pieces.size() * call.num_heads * attention.partial_size());
  attention.partials = partials.data();
  int64_t num_keys = 0;
  for (int64_t row = 0; row < call.num_rows; row++)
    num_keys += call.positions[row] + 1 - first_key(call.positions[row], call.window);
  if (num_keys * call.num_heads * call.key_dim < kWorthAThread) num_threads = 1;
  std::atomic<int64_t> next{0};
  parallel(num_threads, [&](Team team) {
    AttentionScratch scratch;
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < attention.num_items();)
      attention.run(item, scratch);
    if (!attention.must_join()) return;
    team.barrier();
    const Range part = team.part(call.num_rows * call.num_heads);
    for (int64_t i = part.begin; i < part.end; i++) attention.join(i / call.num_heads, i % call.num_heads);
  });
}

template <class T, class Kv>
void attend_prompt(const PromptCall& call, int64_t num_threads) {
  require_below(call.num_slots / call.block_size, call.table, (call.start + call.num_rows - 1) / call.block_size + 1);
  std::vector<PromptPiece> pieces;
  cut_prompt({0, call.num_rows, call.start, call.table}, call.num_heads / call.num_kv_heads, pieces);
  using Queries = StridedQueries<T, PromptCall>;
  const Queries queries{call};
  const PromptAttention<Kv, Queries, T> attention{layer_of<Kv>(call), pieces, queries, static_cast<T*>(call.out),
                                                  call.num_heads * call.value_dim};
  std::atomic<int64_t> next{0};
  parallel(std::min(num_threads, attention.num_items()), [&](Team) {
    static thread_local PromptScratch scratch;
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < attention.num_items();)
      attention.run(item, scratch);
  });
}

}  // namespace

Status ss_attend_decodes(const DecodeCall* call, int64_t dtype, int64_t num_threads) {
  return status_of([&] {
    with_type(dtype, [&](auto one) {
      using T = decltype(one);
      if (call->is_int8) attend_decodes<T, q8>(*call, num_threads);
      else attend_decodes<T, T>(*call, num_threads);
    });
  });
}

Status ss_attend_prompt(const PromptCall* call, int64_t dtype, int64_t num_threads) {
  return status_of([&] {
    with_type(dtype, [&](auto one) {
      using T = decltype(one);
      if (call->is_int8) attend_prompt<T, q8>(*call, num_threads);
      else attend_prompt<T, T>(*call, num_threads);
    });
  });
}

Status ss_write_slots(const char* from, int64_t token_stride, int64_t head_stride, char* pool, int64_t num_slots,
                      const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t num_bytes) {
  return status_of([&] {
    require_below(num_slots, slots, num_tokens);
    for (int64_t head = 0; head < num_heads; head++)
      for (int64_t token = 0; token < num_tokens; token++)
        memcpy(pool + (head * num_slots + slots[token]) * num_bytes, from + token * token_stride + head * head_stride,
               num_bytes);
  });
}
