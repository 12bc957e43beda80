// A whole step of a dense decoder in one parallel region: tokens of decodes and prompts in, hidden states and logits out.
//
//     x = embedding(token) * multiplier
//     each layer:  x += norm?(out(attention(turn(norm?(qkv(norm?(x)))))))
//                  x += norm?(down(act(gate) * up))        [gate | up] = gate_up(norm?(x))
//                  a linear's outputs of rows with an adapter: y += up(down(input))
//     logits = head(norm(x))
//
// A part that a layer does not have is null. States are float32 throughout; weights are of any kind (linear.h), the
// pools of the model's dtype, or int8 (kv_int8.h). Each row is computed alone but for what it reads from the pools, and
// there every number is one that a decode would have written: a row's bits depend on its sequence's tokens, not on the
// chunks in which they came. Between phases all threads wait for each other, five or six times a layer. Where rows are
// few, each thread makes a linear's inputs for itself: that is sooner done than waited for.
#include <atomic>
#include <vector>

#include "abi.h"
#include "attend.h"
#include "attend_prompts.h"
#include "inputs.h"
#include "linear.h"
#include "rows.h"
#include "scratch.h"
#include "step_parts.h"

using namespace ss;

namespace {

// So many numbers each thread prepares for itself.
constexpr int64_t kFewNumbers = 4096;
// So many rows are multiplied by all of a thread's panels before the next ones.
constexpr int64_t kTurnRows = 128;
// So many panels of gate, and of up, are multiplied by a turn's rows before they are gated: whole groups and whole tiles.
constexpr int64_t kTurnPanels = 6;

struct Rotation {
  int64_t num_pairs;
  std::vector<float> cosines, sines;  // (num_rows, num_pairs)

  void turn(float* head, int64_t row) const {
    if (num_pairs) rotate(head, &cosines[row * num_pairs], &sines[row * num_pairs], num_pairs);
  }
};

// The memory of a step, which all threads share.
struct StepMemory {
  float *hidden, *qkv, *attended, *change, *both, *partials;  // both: [gate | up]
  uint8_t *inputs, *inner;                                    // prepared rows; inner: those of `down`
  std::vector<Rotation> rotations;
  std::vector<DecodePieces> pieces;      // of each layer's window, at piece_of[layer]
  std::vector<int64_t> windows, piece_of;
  std::vector<std::vector<PromptPiece>> prompts;  // by group
  std::vector<std::atomic<int64_t>> next;  // the next item of each layer's attention

  StepMemory(const StepModel& model, const StepCall& call) : next(model.num_layers) {
    int64_t widest = model.hidden_size, query = 0, kv = 0, inner_size = 0, inner_bytes = 0, partial = 0, group = 1;
    for (int64_t i = 0; i < model.num_layers; i++) {
      const StepLayer& layer = model.layers[i];
      query = std::max(query, layer.num_heads * layer.head_dim);
      kv = std::max(kv, layer.qkv.num_outputs);
      inner_size = std::max(inner_size, layer.down.num_inputs);
      inner_bytes = std::max(inner_bytes, input_stride(layer.down.kind, layer.down.num_inputs));
      const int64_t place = std::find(windows.begin(), windows.end(), layer.window) - windows.begin();
      if (place == int64_t(windows.size())) {
        windows.push_back(layer.window);
        pieces.emplace_back();
        pieces.back().plan(call.positions, call.num_decodes, layer.window);
      }
      piece_of.push_back(place);
      partial = std::max(partial, pieces[place].size() * layer.num_heads * (padded(layer.head_dim) + 2));
      group = std::max(group, layer.num_heads / layer.num_kv_heads);
      next[i] = 0;
    }
    prompts.resize(call.num_groups);
    for (int64_t g = 0; g < call.num_groups; g++) {
      for (int64_t i = 0; i < call.num_prompts; i++) {
        const StepPrompt& prompt = call.groups[g].prompts[i];
        cut_prompt({prompt.first_row, prompt.num_rows, prompt.start, prompt.table}, group, prompts[g]);
      }
    }
    widest = std::max(widest, query);
    hidden = floats<kStepHidden>(call.num_rows * model.hidden_size);
    qkv = floats<kStepQkv>(call.num_rows * kv);
    attended = floats<kStepAttended>(call.num_rows * query);
    change = floats<kStepChange>(call.num_rows * model.hidden_size);
    both = floats<kStepBoth>(call.num_rows * 2 * inner_size);
    partials = floats<kStepPartials>(partial);
    inputs = scratch<kStepAllInputs>(call.num_rows * std::max(input_bytes(widest), inner_bytes));
    inner = scratch<kStepInner>(call.num_rows * inner_bytes);
    for (int64_t i = 0; i < model.num_rotations; i++) {
      const int64_t pairs = model.rotations[i].num_pairs;
      rotations.push_back({pairs, std::vector<float>(call.num_rows * pairs), std::vector<float>(call.num_rows * pairs)});
    }
  }

  // Enough for a prepared row of any kind.
  static int64_t input_bytes(int64_t num_inputs) {
    return std::max(input_stride(kDense32, num_inputs), input_stride(kInt8, num_inputs));
  }
  // Of the thread that makes the step, and kept for its next step.
  template <ScratchName NAME>
  static float* floats(int64_t count) {
    return reinterpret_cast<float*>(scratch<NAME>(count * int64_t(sizeof(float))));
  }
};

// The heads of a layer's [q | k | v], normalised and turned as they are asked for.
template <class Kv>
struct StepHeads {
  const StepModel& model;
  const StepCall& call;
  const StepLayer& layer;
  const Rotation* rotation;
  const float* qkv;  // (num_rows, qkv.num_outputs)

  // The queries of a group of heads.
  void read(int64_t row, int64_t kv_head, float* to) const {
    const int64_t dim = layer.head_dim, group = layer.num_heads / layer.num_kv_heads;
    const float* heads = qkv + row * layer.qkv.num_outputs;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++, to += padded(dim)) {
      copy_padded(to, heads + head * dim, dim);
      finish(to, row, layer.query_norm ? layer.query_norm + head * dim : nullptr);
      if (call.query_scale)
        map(to, to, padded(dim), [&](Vec x) { return x * broadcast(call.query_scale[row]); });
    }
  }

  void read(int64_t row, int64_t kv_head, bool is_newest, float* to) const {
    read(row, kv_head, to);
    if (is_newest) store_kv(row, kv_head);
  }

  // Put the row's key and value of a head to its slot.
  void store_kv(int64_t row, int64_t kv_head) const {
    const int64_t dim = layer.head_dim;
    const float* key = qkv + row * layer.qkv.num_outputs + (layer.num_heads + kv_head) * dim;
    float turned[kMostHeadDim];
    copy_padded(turned, key, dim);
    finish(turned, row, layer.key_norm ? layer.key_norm + kv_head * dim : nullptr);
    const int64_t slot = call.groups[layer.group].slots[row];
    const int64_t place = (kv_head * model.num_slots + slot) * row_stride<Kv>(dim);
    store_vector(turned, dim, static_cast<Kv*>(layer.keys) + place);
    store_vector(key + layer.num_kv_heads * dim, dim, static_cast<Kv*>(layer.values) + place);
  }

 private:
  void finish(float* head, int64_t row, const float* weight) const {
    if (weight && layer.norm_kind == kNormOfHeads) rms_norm(head, weight, layer.head_dim, model.eps, head);
    if (rotation) rotation->turn(head, row);
  }
};

// One thread's share of a step.
template <class Kv>
class StepThread {
 public:
  StepThread(const StepModel& model, const StepCall& call, StepMemory& memory, Team team)
      : model_(model), call_(call), memory_(memory), team_(team), rows_(team.part(call.num_rows)) {
    for (int64_t i = 0; i < call.num_runs; i++) num_adapted_ += call.runs[i].num_rows;
  }

  void run() {
    begin();
    for (int64_t i = 0; i < model_.num_layers; i++) {
      const StepLayer& layer = model_.layers[i];
      const float* heads = memory_.qkv;
      multiply_rows(layer.qkv, normal(layer.attention_norm), call_.num_rows, memory_.qkv);
      add_loras(i, kQkv, normal(layer.attention_norm), memory_.qkv, layer.qkv.num_outputs);
      if (layer.norm_kind == kNormOfRows) normalise_rows(layer);
      attend(layer, i, heads);
      add(layer.out, i, kOut, plain(memory_.attended, layer.out.num_inputs), layer.after_attention_norm);
      feed_forward(layer, i);
    }
    end();
  }

 private:
  const StepModel& model_;
  const StepCall& call_;
  StepMemory& memory_;
  Team team_;
  Range rows_;
  int64_t num_adapted_ = 0;  // rows with an adapter

  float* hidden(int64_t row) const { return memory_.hidden + row * model_.hidden_size; }

  // Rows of a linear's input, as functions row -> numbers; `own` is this thread's memory for a row.
  auto normal(const float* weight) const {
    return [this, weight](int64_t row, float* own) -> const float* {
      if (!weight) return hidden(row);
      rms_norm(hidden(row), weight, model_.hidden_size, model_.eps, own);
      return own;
    };
  }
  static auto plain(const float* data, int64_t stride) {
    return [data, stride](int64_t row, float*) { return data + row * stride; };
  }

  void begin() {
    for (int64_t row = rows_.begin; row < rows_.end; row++) {
      const auto scaled = [&](Vec x) { return x * broadcast(model_.embedding_multiplier); };
      if (model_.embedding) {
        with_type(model_.dtype, [&](auto number) {
          const auto* table = static_cast<const decltype(number)*>(model_.embedding);
          map(hidden(row), table + call_.token_ids[row] * model_.hidden_size, model_.hidden_size, scaled);
        });
      } else {
        unpack_row(model_.table, call_.token_ids[row], hidden(row));
        map(hidden(row), hidden(row), model_.hidden_size, scaled);
      }
      for (int64_t i = 0; i < model_.num_rotations; i++) {
        const StepRotation& given = model_.rotations[i];
        Rotation& rotation = memory_.rotations[i];
        for (int64_t pair = 0; pair < given.num_pairs; pair++) {
          const float angle = float(call_.positions[row]) * given.frequencies[pair];
          rotation.cosines[row * given.num_pairs + pair] = std::cos(angle) * given.scaling;
          rotation.sines[row * given.num_pairs + pair] = std::sin(angle) * given.scaling;
        }
      }
    }
    team_.barrier();
  }

  // The inputs of a linear for the first `num_rows` rows, prepared.
  template <class Source>
  const uint8_t* prepare(const Linear& linear, const Source& source, int64_t num_rows) {
    const int64_t stride = input_stride(linear.kind, linear.num_inputs);
    const bool for_itself = num_rows * linear.num_inputs <= kFewNumbers;
    uint8_t* to = for_itself ? scratch<kStepInputs>(num_rows * stride) : memory_.inputs;
    float* own = reinterpret_cast<float*>(scratch<kStepRow>(linear.num_inputs * 4));
    const Range rows = for_itself ? Range{0, num_rows} : team_.part(num_rows);
    for (int64_t row = rows.begin; row < rows.end; row++)
      prepare_row(linear.kind, linear.num_inputs, source(row, own), to + row * stride);
    if (!for_itself) team_.barrier();
    return to;
  }

  template <class Source>
  void multiply_rows(const Linear& linear, const Source& source, int64_t num_rows, float* out) {
    const uint8_t* inputs = prepare(linear, source, num_rows);
    multiply_part(linear, inputs, num_rows, team_.part(linear.num_panels()), out, linear.num_outputs, false);
    team_.barrier();
  }

  // A prompt's rows take turns, so that those that go through a panel's weights stay in the second-level cache.
  static void multiply_part(const Linear& linear, const uint8_t* inputs, int64_t num_rows, Range panels, float* out,
                            int64_t stride, bool adds) {
    const int64_t input_bytes = input_stride(linear.kind, linear.num_inputs);
    for (int64_t row = 0; row < num_rows; row += kTurnRows) {
      const int64_t count = std::min(kTurnRows, num_rows - row);
      multiply(linear, inputs + row * input_bytes, count, panels, Outputs{out + row * stride, kFloat32, stride, adds});
    }
  }

  // Add what adapters change of a linear's outputs, which all threads have written. Where rows are few, each thread has
  // a part of the outputs of all of them, else all outputs of a part of the rows.
  template <class Source>
  void add_loras(int64_t layer, StepPart part, const Source& source, float* out, int64_t stride) {
    if (num_adapted_ == 0) return;
    const bool is_few = num_adapted_ < team_.num_threads;
    const Range own = is_few ? Range{0, num_adapted_} : team_.part(num_adapted_);
    int64_t num_passed = 0;
    for (int64_t i = 0; i < call_.num_runs; i++) {
      const StepRun& run = call_.runs[i];
      const int64_t* first_of = run.adapter->first_of + layer * kNumParts + part;
      const Range loras{first_of[0], first_of[1]};
      const int64_t begin = std::max<int64_t>(own.begin - num_passed, 0);
      const int64_t end = std::min(own.end - num_passed, run.num_rows);
      num_passed += run.num_rows;
      if (loras.begin == loras.end) continue;
      for (int64_t row = begin; row < end; row += kTurnRows)
        add_loras_to(*run.adapter, loras, run.first_row + row, std::min(kTurnRows, end - row), is_few, source, out,
                    stride);
    }
    team_.barrier();
  }

  template <class Source>
  void add_loras_to(const StepAdapter& adapter, Range loras, int64_t first_row, int64_t num_rows, bool is_few,
                   const Source& source, float* out, int64_t stride) {
    const Linear& first = adapter.loras[loras.begin].down;  // all have the same inputs
    const int64_t input_bytes = input_stride(first.kind, first.num_inputs);
    uint8_t* inputs = scratch<kAdapterInputs>(num_rows * input_bytes);
    float* own = reinterpret_cast<float*>(scratch<kStepRow>(first.num_inputs * 4));
    for (int64_t i = 0; i < num_rows; i++)
      prepare_row(first.kind, first.num_inputs, source(first_row + i, own), inputs + i * input_bytes);
    for (int64_t index = loras.begin; index < loras.end; index++) {
      const auto& [down, up, begin] = adapter.loras[index];
      const int64_t rank = down.num_outputs, inner_bytes = input_stride(up.kind, rank);
      const int64_t plain_bytes = round_up(num_rows * rank * 4, 64);
      uint8_t* memory = scratch<kAdapterInner>(plain_bytes + num_rows * inner_bytes);
      float* inner = reinterpret_cast<float*>(memory);
      multiply(down, inputs, num_rows, {0, down.num_panels()}, Outputs{inner, kFloat32, rank});
      for (int64_t i = 0; i < num_rows; i++)
        prepare_row(up.kind, rank, inner + i * rank, memory + plain_bytes + i * inner_bytes);
      const Range panels = is_few ? team_.part(up.num_panels()) : Range{0, up.num_panels()};
      multiply(up, memory + plain_bytes, num_rows, panels, Outputs{out + first_row * stride + begin, kFloat32, stride, true});
    }
  }

  // x += norm?(linear(source)) * multiplier
  template <class Source>
  void add(const Linear& linear, int64_t layer, StepPart part, const Source& source, const float* norm) {
    add(linear, layer, part, source, prepare(linear, source, call_.num_rows), norm);
  }

  // The same with `inputs`, the source's prepared rows.
  template <class Source>
  void add(const Linear& linear, int64_t layer, StepPart part, const Source& source, const uint8_t* inputs,
           const float* norm) {
    const Range panels = team_.part(linear.num_panels());
    const bool adds = !norm && model_.residual_multiplier == 1;
    float* out = adds ? memory_.hidden : memory_.change;
    multiply_part(linear, inputs, call_.num_rows, panels, out, model_.hidden_size, adds);
    team_.barrier();
    add_loras(layer, part, source, out, model_.hidden_size);
    if (adds) return;
    for (int64_t row = rows_.begin; row < rows_.end; row++) {
      float* change = out + row * model_.hidden_size;
      if (norm) rms_norm(change, norm, model_.hidden_size, model_.eps, change);
      for (int64_t i = 0; i < model_.hidden_size; i++) hidden(row)[i] += change[i] * model_.residual_multiplier;
    }
    team_.barrier();
  }

  // Norms over all query heads together, and over all key heads.
  void normalise_rows(const StepLayer& layer) {
    const int64_t query = layer.num_heads * layer.head_dim, key = layer.num_kv_heads * layer.head_dim;
    for (int64_t row = rows_.begin; row < rows_.end; row++) {
      float* heads = memory_.qkv + row * layer.qkv.num_outputs;
      rms_norm(heads, layer.query_norm, query, model_.eps, heads);
      rms_norm(heads + query, layer.key_norm, key, model_.eps, heads + query);
    }
    team_.barrier();
  }

  void attend(const StepLayer& layer, int64_t index, const float* qkv) {
    const Rotation* rotation = layer.rotation < 0 ? nullptr : &memory_.rotations[layer.rotation];
    const StepHeads<Kv> heads{model_, call_, layer, rotation, qkv};
    const DecodePieces& pieces = memory_.pieces[memory_.piece_of[index]];
    const StepGroup& group = call_.groups[layer.group];
    const AttentionLayer<Kv> shape{static_cast<const Kv*>(layer.keys),
                                   static_cast<const Kv*>(layer.values),
                                   model_.num_slots,
                                   layer.num_heads,
                                   layer.num_kv_heads,
                                   layer.head_dim,
                                   layer.head_dim,
                                   model_.block_size,
                                   layer.scaling,
                                   layer.window,
                                   layer.softcap,
                                   layer.sinks};
    const DecodeAttention<Kv, StepHeads<Kv>, float> attention{shape,
                                                              pieces,
                                                              call_.positions,
                                                              group.tables,
                                                              group.table_stride,
                                                              heads,
                                                              memory_.attended,
                                                              layer.num_heads * layer.head_dim,
                                                              memory_.partials};
    const PromptAttention<Kv, StepHeads<Kv>, float> prompts{shape, memory_.prompts[layer.group], heads,
                                                            memory_.attended, attention.out_stride};
    if (call_.num_prompts > 0) store_prompts(layer, heads);
    static thread_local AttentionScratch scratch;
    static thread_local PromptScratch prompt_scratch;
    const int64_t num_long = prompts.num_items(), num_items = num_long + attention.num_items();
    std::atomic<int64_t>& next = memory_.next[index];
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
      if (item < num_long) prompts.run(item, prompt_scratch);
      else attention.run(item - num_long, scratch);
    }
    team_.barrier();
    if (!attention.must_join()) return;
    const Range part = team_.part(call_.num_decodes * layer.num_heads);
    for (int64_t i = part.begin; i < part.end; i++) attention.join(i / layer.num_heads, i % layer.num_heads);
    team_.barrier();
  }

  // A prompt's tokens see each other: their keys and values are stored before any of them attends.
  void store_prompts(const StepLayer& layer, const StepHeads<Kv>& heads) {
    const Range rows = team_.part(call_.num_rows - call_.num_decodes);
    for (int64_t row = call_.num_decodes + rows.begin; row < call_.num_decodes + rows.end; row++)
      for (int64_t kv_head = 0; kv_head < layer.num_kv_heads; kv_head++) heads.store_kv(row, kv_head);
    team_.barrier();
  }

  // Each thread computes the same columns of gate and up, so that it can multiply them without waiting.
  void feed_forward(const StepLayer& layer, int64_t index) {
    const Linear& down = layer.down;
    const int64_t inner = down.num_inputs, num_rows = call_.num_rows, stride = 2 * inner;
    const uint8_t* inputs = prepare(layer.gate_up, normal(layer.mlp_norm), num_rows);
    if (num_adapted_ == 0 && num_rows * inner > kFewNumbers) {
      gate_prepared(layer, inputs);
      return add(down, index, kDown, plain(memory_.both, stride), memory_.inner, layer.after_mlp_norm);
    }
    const Range panels = team_.part(inner / kLanes);
    const Range upper{panels.begin + inner / kLanes, panels.end + inner / kLanes};
    for (const Range& part : {panels, upper})
      multiply_part(layer.gate_up, inputs, num_rows, part, memory_.both, stride, false);
    if (num_adapted_ > 0) {
      team_.barrier();
      add_loras(index, kGateUp, normal(layer.mlp_norm), memory_.both, stride);
    }
    const Range columns{panels.begin * kLanes, panels.end * kLanes};
    for (int64_t row = 0; row < num_rows; row++) {
      float* both = memory_.both + row * stride;
      gate(model_.activation, both + columns.begin, both + inner + columns.begin, columns.end - columns.begin);
    }
    team_.barrier();
    add(down, index, kDown, plain(memory_.both, stride), layer.after_mlp_norm);
  }

  // Gate and up of many rows: some columns of some rows at a time, which stay in the second-level cache until they are
  // multiplied and prepared for the next linear.
  void gate_prepared(const StepLayer& layer, const uint8_t* inputs) {
    const Linear& down = layer.down;
    const int64_t inner = down.num_inputs, width = kTurnPanels * kLanes;
    const int64_t input_bytes = input_stride(layer.gate_up.kind, layer.gate_up.num_inputs);
    const int64_t down_bytes = input_stride(down.kind, inner);
    const Range own = team_.part(inner / kLanes, kGroup / kLanes);
    float* both = reinterpret_cast<float*>(scratch<kStepGated>(kTurnRows * 2 * width * int64_t(sizeof(float))));
    for (int64_t row = 0; row < call_.num_rows; row += kTurnRows) {
      const int64_t count = std::min(kTurnRows, call_.num_rows - row);
      for (int64_t first = own.begin; first < own.end; first += kTurnPanels) {
        const Range panels{first, std::min(first + kTurnPanels, own.end)};
        const Range upper{panels.begin + inner / kLanes, panels.end + inner / kLanes};
        const Range columns{panels.begin * kLanes, panels.end * kLanes};
        multiply(layer.gate_up, inputs + row * input_bytes, count, panels, Outputs{both - columns.begin, kFloat32, 2 * width});
        multiply(layer.gate_up, inputs + row * input_bytes, count, upper,
                 Outputs{both + width - upper.begin * kLanes, kFloat32, 2 * width});
        for (int64_t i = 0; i < count; i++) {
          float* gates = both + i * 2 * width;
          gate(model_.activation, gates, gates + width, columns.end - columns.begin);
          prepare_part(down.kind, inner, gates, columns, memory_.inner + (row + i) * down_bytes);
        }
      }
    }
    team_.barrier();
  }

  void end() {
    for (int64_t row = rows_.begin; row < rows_.end; row++)
      rms_norm(hidden(row), model_.norm, model_.hidden_size, model_.eps, call_.hidden + row * model_.hidden_size);
    team_.barrier();
    if (!call_.logits) return;
    multiply_rows(model_.head, plain(call_.hidden, model_.hidden_size), call_.num_decodes, call_.logits);
  }
};

// Throw std::out_of_range unless the prompt's blocks are in the pools, and enough for its last position.
void require_prompt(const StepModel& model, const StepPrompt& prompt) {
  const int64_t last = prompt.start + prompt.num_rows - 1;
  require_below(prompt.num_blocks * model.block_size, &last, 1);
  require_below(model.num_slots / model.block_size, prompt.table, last / model.block_size + 1);
}

template <class Kv>
void run_step(const StepModel& model, const StepCall& call, int64_t num_threads) {
  require_below(model.num_embeddings, call.token_ids, call.num_rows);
  for (int64_t g = 0; g < call.num_groups; g++) {
    const StepGroup& group = call.groups[g];
    require_below(model.num_slots, group.slots, call.num_rows);
    require_blocks(call.positions, group.tables, call.num_decodes, group.table_stride, model.block_size,
                   model.num_slots);
    for (int64_t i = 0; i < call.num_prompts; i++) require_prompt(model, group.prompts[i]);
  }
  for (int64_t i = 0; i < model.num_layers; i++) require_below(call.num_groups, &model.layers[i].group, 1);
  StepMemory memory(model, call);
  parallel(num_threads, [&](Team team) { StepThread<Kv>(model, call, memory, team).run(); });
}

}  // namespace

Status ss_step(const StepModel* model, const StepCall* call, int64_t num_threads) {
  return status_of([&] {
    if (model->is_int8) return run_step<q8>(*model, *call, num_threads);
    with_type(model->dtype, [&](auto number) { run_step<decltype(number)>(*model, *call, num_threads); });
  });
}
