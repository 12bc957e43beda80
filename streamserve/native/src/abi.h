// The library's C ABI: every function that Python calls (library.py lists them with their types).
//
// Addresses point to contiguous memory that the caller keeps alive; sizes are int64; dtypes are DType of types.h. A
// function never throws, allocates only scratch memory, and uses `num_threads` threads of the process's OpenMP pool.
// Where a Status other than kDone is returned, outputs hold anything.
#pragma once

#include <cstdint>

#include "linear.h"
#include "status.h"

#define SS_API extern "C" __attribute__((visibility("default")))

constexpr int64_t kAbiVersion = 3;  // library.py's ABI_VERSION; a changed argument list raises both

SS_API int64_t ss_abi_version();

// 0 if the library computes here: run once, in a process of its own, after it was compiled.
SS_API int ss_self_check();

// How many threads a region of `num_threads` gets.
SS_API int64_t ss_team_size(int64_t num_threads);

// Linears (linear.h). `kind`: Kind; the float kinds have the number of their dtype.

// Bytes of a packed weight (num_outputs, num_inputs).
SS_API int64_t ss_linear_bytes(int64_t kind, int64_t num_outputs, int64_t num_inputs);

// Pack `weight` (num_outputs, num_inputs) of the kind's dtype into `packed`, ss_linear_bytes() bytes.
SS_API void ss_pack_dense(int64_t kind, const void* weight, int64_t num_outputs, int64_t num_inputs, void* packed,
                          int64_t num_threads);

// Pack `q` (num_outputs, num_inputs) and fp16 `scales` (num_outputs, ceil(num_inputs / 32)).
SS_API void ss_pack_int8(const int8_t* q, const void* scales, int64_t num_outputs, int64_t num_inputs, void* packed,
                         int64_t num_threads);

// The same with q 0..15, a byte each, and fp16 `minima` of the scales' shape.
SS_API void ss_pack_int4(const uint8_t* q, const void* scales, const void* minima, int64_t num_outputs,
                         int64_t num_inputs, void* packed, int64_t num_threads);

// Quantise `weight` (num_outputs, num_inputs) of `dtype` per 32 inputs; the outputs have the shapes that packing reads.
SS_API void ss_quantize_int8(int64_t dtype, const void* weight, int64_t num_outputs, int64_t num_inputs, int8_t* q,
                             void* scales, int64_t num_threads);
SS_API void ss_quantize_int4(int64_t dtype, const void* weight, int64_t num_outputs, int64_t num_inputs, uint8_t* q,
                             void* scales, void* minima, int64_t num_threads);

// y (num_rows, num_outputs) = x (num_rows, num_inputs) times the packed weight, plus `bias` (num_outputs,) or null.
SS_API ss::Status ss_linear(int64_t kind, const void* packed, const float* bias, int64_t num_outputs, int64_t num_inputs,
                            int64_t x_dtype, const void* x, int64_t num_rows, int64_t y_dtype, void* y,
                            int64_t num_threads);

// y (num_rows, num_inputs) of `y_dtype`: the numbers that `rows` (num_rows,) of the packed weight stand for.
SS_API ss::Status ss_linear_rows(int64_t kind, const void* packed, int64_t num_outputs, int64_t num_inputs,
                                 const int64_t* rows, int64_t num_rows, int64_t y_dtype, void* y, int64_t num_threads);

// Decode attention of one layer (attend.h). Queries, pools and outputs have one dtype; strides count numbers.
// With `is_int8` the pools have rows of kv_int8.h instead, dim + 4 bytes each.
struct DecodeCall {
  const void* query;  // (num_rows, num_heads, key_dim), strided
  void* out;          // (num_rows, num_heads, value_dim)
  const void* keys;   // (num_kv_heads, num_slots, key_dim)
  const void* values;
  const int64_t* positions;  // (num_rows,) of the rows' newest tokens, which the pools hold already
  const int64_t* tables;     // (num_rows, table_stride)
  const float* sinks;        // (num_heads,), or null
  int64_t query_row_stride, query_head_stride, table_stride, num_slots;
  int64_t num_rows, num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t window;  // 0: none
  int64_t is_int8;
  float scaling;
  float softcap;  // 0: none
};
SS_API ss::Status ss_attend_decodes(const DecodeCall* call, int64_t dtype, int64_t num_threads);

// Attention of several tokens of one sequence (attend_prompts.h), whose keys and values the pools hold already.
struct PromptCall {
  const void* query;  // (num_rows, num_heads, key_dim), strided
  void* out;          // (num_rows, num_heads, value_dim)
  const void* keys;   // (num_kv_heads, num_slots, key_dim)
  const void* values;
  const int64_t* table;  // the sequence's blocks
  const float* sinks;    // (num_heads,), or null
  int64_t query_row_stride, query_head_stride, num_slots;
  int64_t start;  // position of the first row
  int64_t num_rows, num_heads, num_kv_heads, key_dim, value_dim, block_size;
  int64_t window;  // 0: none
  int64_t is_int8;
  float scaling;
  float softcap;  // 0: none
};
SS_API ss::Status ss_attend_prompt(const PromptCall* call, int64_t dtype, int64_t num_threads);

// Copy each token's vectors to its slot, for each head: from token t, head h at from + t * token_stride + h *
// head_stride to pool (num_heads, num_slots, num_bytes). Sizes and strides in bytes.
SS_API ss::Status ss_write_slots(const char* from, int64_t token_stride, int64_t head_stride, char* pool,
                                 int64_t num_slots, const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                                 int64_t num_bytes);

// The draws of a step (sample.cpp). A temperature of 0 is greedy.
struct DrawCall {
  const float* logits;  // (num_rows, vocab_size), rows row_stride apart
  const float* shapes;  // (num_rows, 3): temperature, top_p, min_p
  const int64_t* keys;  // (num_rows, 3): top_k (0: none) and the two keys of `sampler.row_key`
  int64_t* token_ids;   // (num_rows,), of a row that is not finite an arbitrary id
  uint8_t* is_finite;   // (num_rows,)
  int64_t num_rows, vocab_size, row_stride;
};
SS_API ss::Status ss_draw(const DrawCall* call, int64_t num_threads);

// The experts of a layer (experts.h). Norms and scales are float32, and null where there are none.

enum Routing : int64_t { kSoftmaxAll = 0, kSoftmaxTaken = 1 };  // of which experts the shares add up to 1

struct Experts {
  const ss::Linear *gate_up, *down;  // (num_experts,); all of a list have one shape and kind, `down` inputs by 16
  ss::Linear router;
  const float *router_norm, *norm, *after_norm;  // (hidden_size,) of the router's input, of the experts' input and output
  const float* expert_scale;                     // (num_experts,) of an expert's share
  int64_t num_experts, num_taken, routing;
  int64_t activation;  // Activation of step_parts.h
  float limit, alpha;  // gpt-oss' gate; limit 0: it has the activation's
  float eps;
};

// y (num_rows, hidden_size) of x (num_rows, hidden_size), both of `dtype`.
SS_API ss::Status ss_experts(const Experts* experts, int64_t dtype, const void* x, int64_t num_rows, void* y,
                             int64_t num_threads);

// A whole decode step (step.cpp). The model's description lives as long as the model.

enum NormKind : int64_t { kNoNorm = 0, kNormOfHeads = 1, kNormOfRows = 2 };

constexpr int64_t kMostHeadDim = 512;

struct StepRotation {
  const float* frequencies;  // (num_pairs,)
  int64_t num_pairs;
  float scaling;  // of cosines and sines
};

// Weights of norms are float32, and null where there is no such norm.
struct StepLayer {
  ss::Linear qkv, out, gate_up, down;
  const float *attention_norm, *after_attention_norm, *mlp_norm, *after_mlp_norm;  // (hidden_size,)
  const float *query_norm, *key_norm;  // (num_heads * head_dim,), (num_kv_heads * head_dim,)
  void *keys, *values;                 // pools (num_kv_heads, num_slots, head_dim) of the model's dtype, or int8
  const float* sinks;                  // (num_heads,), or null
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t window;     // 0: none
  int64_t rotation;   // -1: none
  int64_t norm_kind;  // NormKind, of query_norm and key_norm
  int64_t group;      // of StepCall.groups: whose tables lead to its keys
  float scaling;
  float softcap;  // 0: none
};

struct StepModel {
  const StepLayer* layers;
  const StepRotation* rotations;
  const void* embedding;  // (num_embeddings, hidden_size) of the model's dtype; null: the rows of `table`
  const float* norm;
  ss::Linear head, table;
  int64_t num_layers, num_rotations, num_embeddings, hidden_size, dtype, block_size, num_slots;
  int64_t activation;  // Activation of step_parts.h
  int64_t is_int8;     // the pools have rows of kv_int8.h
  float eps, embedding_multiplier, residual_multiplier;
};

// Tokens of a prompt: the rows [first_row, first_row + num_rows) of a step, from position `start` on.
struct StepPrompt {
  const int64_t* table;  // (num_blocks,)
  int64_t first_row, num_rows, start, num_blocks;
};

// What an adapter (LoRA) adds to outputs of a linear layer, from number `begin` on: up(down(x)).
struct StepLora {
  ss::Linear down, up;
  int64_t begin;
};

enum StepPart : int64_t { kQkv = 0, kOut = 1, kGateUp = 2, kDown = 3, kNumParts = 4 };  // linears of a layer

// The loras of part p of layer i are [first_of[4 i + p], first_of[4 i + p + 1]); one kind of weight in all of them.
struct StepAdapter {
  const StepLora* loras;
  const int64_t* first_of;  // (4 num_layers + 1,)
};

// The rows [first_row, first_row + num_rows) are of sequences with an adapter. No row is in two runs.
struct StepRun {
  const StepAdapter* adapter;
  int64_t first_row, num_rows;
};

// Where the keys and values of a group of layers are. Before a layer's window a table may lead to block 0.
struct StepGroup {
  const int64_t* slots;       // (num_rows,)
  const int64_t* tables;      // (num_decodes, table_stride)
  const StepPrompt* prompts;  // (num_prompts,), the same prompts in each group
  int64_t table_stride;
};

// The first num_decodes rows are one token of a sequence each, the rest are those of the prompts, in their order.
struct StepCall {
  const int64_t *token_ids, *positions;  // (num_rows,)
  const StepGroup* groups;               // (num_groups,)
  const float* query_scale;              // (num_rows,), or null
  const StepRun* runs;                   // (num_runs,)
  float* hidden;                         // out: (num_rows, hidden_size), normalised
  float* logits;                         // out: (num_decodes, head.num_outputs), or null
  int64_t num_rows, num_decodes, num_prompts, num_groups, num_runs;
};
SS_API ss::Status ss_step(const StepModel* model, const StepCall* call, int64_t num_threads);
