// Steps of small models of every kind: a row is the same alone and in company, in a decode and in a prompt, with one
// thread and with several.
// tests/engine/model/decoder/test_step.py compares them with the decoder's layers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "check.h"

namespace ss {
namespace {

struct Shape {
  int64_t hidden, heads, kv_heads, head_dim, inner, window, norm_kind, activation;
  float softcap, multiplier;
  bool has_norms, has_rotation, has_sinks;
};

constexpr int64_t kNumLayers = 2, kVocab = 37, kBlockSize = 4;

// A model with random weights of one kind, and pools for rows of given lengths; everything in buffers of its own.
template <class T>
struct Model {
  Shape shape;
  Numbers numbers;
  StepModel model{};
  std::vector<StepLayer> layers;
  std::vector<StepRotation> rotations;
  std::vector<std::unique_ptr<std::vector<float>>> floats;
  std::vector<Weight> weights;
  std::vector<std::vector<T>> pools;
  std::vector<T> embedding;
  std::vector<int64_t> positions, slots, tables, token_ids;
  std::vector<float> query_scale;
  std::vector<StepLora> changes;
  std::vector<int64_t> first_of;
  StepAdapter adapter{};
  int64_t stride;

  Model(const Shape& given, int64_t kind, int64_t dtype, std::vector<int64_t> lengths) : shape(given) {
    const int64_t num_rows = int64_t(lengths.size());
    stride = (*std::max_element(lengths.begin(), lengths.end()) - 1) / kBlockSize + 1;
    const int64_t num_blocks = num_rows * stride;
    for (int64_t i = 0; i < num_blocks; i++) tables.push_back(num_blocks - 1 - i);
    for (int64_t row = 0; row < num_rows; row++) {
      const int64_t position = lengths[size_t(row)] - 1;
      positions.push_back(position);
      slots.push_back(tables[size_t(row * stride + position / kBlockSize)] * kBlockSize + position % kBlockSize);
      token_ids.push_back(row == 0 ? kVocab - 1 : numbers.below(kVocab));
    }
    query_scale = numbers.vector<float>(num_rows);
    model.num_slots = num_blocks * kBlockSize;
    weights.reserve(size_t(kNumLayers * (4 + 2 * 5) + 1));
    for (int64_t i = 0; i < kNumLayers; i++) layers.push_back(make_layer(i, kind));
    rotations.push_back({floats_of(shape.head_dim / 2), shape.head_dim / 2, 1.0f});
    embedding = numbers.vector<T>(kVocab * shape.hidden);
    model.layers = layers.data(), model.rotations = rotations.data(), model.embedding = embedding.data();
    model.norm = floats_of(shape.hidden), model.head = linear(kind, kVocab, shape.hidden);
    model.num_layers = kNumLayers, model.num_rotations = 1, model.num_embeddings = kVocab;
    model.hidden_size = shape.hidden, model.dtype = dtype, model.block_size = kBlockSize;
    model.activation = shape.activation, model.eps = 1e-5f;
    model.embedding_multiplier = 2, model.residual_multiplier = shape.multiplier;
    first_of.push_back(0);
    for (const StepLayer& layer : layers) {
      change(kind, layer.qkv, 0, shape.heads * shape.head_dim);
      change(kind, layer.qkv, layer.qkv.num_outputs - shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim);
      first_of.push_back(int64_t(changes.size()));
      for (const Linear& linear : {layer.out, layer.gate_up, layer.down}) {
        if (shape.has_sinks || linear.num_inputs == shape.inner) change(kind, linear, 0, linear.num_outputs);
        first_of.push_back(int64_t(changes.size()));
      }
    }
    adapter = {changes.data(), first_of.data()};
  }

  // An adapter changes these outputs of a linear.
  void change(int64_t kind, const Linear& of, int64_t begin, int64_t num_outputs) {
    const int64_t rank = 3 + int64_t(changes.size());
    changes.push_back({linear(kind, rank, of.num_inputs), linear(kind, num_outputs, rank), begin});
  }

  // Rows 1, 2 and 5 have the adapter.
  std::vector<StepRun> runs_of(int64_t first, int64_t num_rows) const {
    std::vector<StepRun> runs;
    for (const Range& range : {Range{1, 3}, Range{5, 6}}) {
      const int64_t begin = std::max(range.begin, first), end = std::min(range.end, first + num_rows);
      if (begin < end) runs.push_back({&adapter, begin - first, end - begin});
    }
    return runs;
  }

  const float* floats_of(int64_t count) {
    floats.push_back(std::make_unique<std::vector<float>>(numbers.vector<float>(count)));
    return floats.back()->data();
  }
  Linear linear(int64_t kind, int64_t num_outputs, int64_t num_inputs) {
    weights.push_back(make_weight(kind, num_outputs, num_inputs, numbers));
    return {kind, weights.back().packed.data(), floats_of(num_outputs), num_outputs, num_inputs};
  }
  T* pool() {
    pools.push_back(numbers.vector<T>(shape.kv_heads * model.num_slots * shape.head_dim));
    return pools.back().data();
  }

  StepLayer make_layer(int64_t index, int64_t kind) {
    const int64_t query = shape.heads * shape.head_dim, key = shape.kv_heads * shape.head_dim;
    StepLayer layer{};
    layer.qkv = linear(kind, query + 2 * key, shape.hidden), layer.out = linear(kind, shape.hidden, query);
    layer.gate_up = linear(kind, 2 * shape.inner, shape.hidden), layer.down = linear(kind, shape.hidden, shape.inner);
    layer.attention_norm = floats_of(shape.hidden), layer.mlp_norm = floats_of(shape.hidden);
    if (shape.has_norms) layer.after_attention_norm = floats_of(shape.hidden);
    if (shape.has_norms) layer.after_mlp_norm = floats_of(shape.hidden);
    if (shape.norm_kind != kNoNorm) layer.query_norm = floats_of(query), layer.key_norm = floats_of(key);
    layer.keys = pool(), layer.values = pool();
    layer.sinks = shape.has_sinks ? floats_of(shape.heads) : nullptr;
    layer.num_heads = shape.heads, layer.num_kv_heads = shape.kv_heads, layer.head_dim = shape.head_dim;
    layer.group = index ? 1 : 0;  // of two with the same tables
    layer.window = index ? shape.window : 0, layer.rotation = shape.has_rotation ? 0 : -1;
    layer.norm_kind = shape.norm_kind, layer.scaling = 0.3f, layer.softcap = shape.softcap;
    return layer;
  }

  // The logits (num_rows, kVocab) of rows from `first` on; `status` is what the library returned.
  std::vector<float> run(int64_t first, int64_t num_rows, int64_t num_threads, Status* status = nullptr) {
    std::vector<float> hidden(size_t(num_rows * shape.hidden)), logits(size_t(num_rows * kVocab));
    const StepGroup group{slots.data() + first, tables.data() + first * stride, nullptr, stride};
    const StepGroup groups[] = {group, group};
    StepCall call{};
    call.token_ids = token_ids.data() + first, call.positions = positions.data() + first;
    call.groups = groups, call.num_groups = 2;
    call.query_scale = shape.has_sinks ? query_scale.data() + first : nullptr;
    call.hidden = hidden.data(), call.logits = logits.data();
    call.num_rows = num_rows, call.num_decodes = num_rows;
    const std::vector<StepRun> own = runs_of(first, num_rows);
    call.runs = own.data(), call.num_runs = int64_t(own.size());
    const Status found = [&] {
      const Limited limited;
      return ss_step(&model, &call, num_threads);
    }();
    if (status) *status = found;
    else expect(found == kDone, "a step fails", num_rows, num_threads);
    return logits;
  }
};

// The hidden states (num_tokens, hidden_size) of a sequence, in chunks of `size` tokens: of single tokens as decodes.
template <class T>
std::vector<float> read_prompt(Model<T>& model, int64_t num_tokens, int64_t size, int64_t num_threads) {
  Numbers numbers;
  std::vector<int64_t> token_ids, positions, slots;
  for (int64_t i = 0; i < num_tokens; i++) {
    token_ids.push_back(numbers.below(kVocab));
    positions.push_back(i);
    slots.push_back(model.tables[size_t(i / kBlockSize)] * kBlockSize + i % kBlockSize);
  }
  const std::vector<float> query_scale(size_t(num_tokens), 1.5f);
  std::vector<float> hidden(size_t(num_tokens * model.shape.hidden));
  for (int64_t start = 0; start < num_tokens; start += size) {
    const int64_t num_rows = std::min(size, num_tokens - start), is_decode = size == 1;
    std::vector<float> logits(size_t(is_decode * kVocab));
    const StepPrompt prompt{model.tables.data(), 0, num_rows, start, model.stride};
    const StepGroup group{slots.data() + start, is_decode ? model.tables.data() : nullptr,
                          is_decode ? nullptr : &prompt, model.stride};
    const StepGroup groups[] = {group, group};
    const StepRun run{&model.adapter, 0, num_rows};
    StepCall call{};
    call.token_ids = token_ids.data() + start, call.positions = positions.data() + start;
    call.groups = groups, call.num_groups = 2;
    (is_decode ? call.num_decodes : call.num_prompts) = 1;
    if (is_decode) call.logits = logits.data();
    call.query_scale = model.shape.has_sinks ? query_scale.data() + start : nullptr;
    call.hidden = hidden.data() + start * model.shape.hidden;
    call.num_rows = num_rows;
    call.runs = &run, call.num_runs = model.shape.has_norms ? 1 : 0;
    expect(ss_step(&model.model, &call, num_threads) == kDone, "a prompt fails", num_rows, num_threads);
  }
  return hidden;
}

template <class T>
void check_prompt(const Shape& shape, int64_t kind, int64_t dtype) {
  const int64_t num_tokens = 90;
  Model<T> model(shape, kind, dtype, {num_tokens});
  const std::vector<float> whole = read_prompt(model, num_tokens, num_tokens, 1);
  for (float number : whole) expect(std::isfinite(number), "not finite: kind, dtype", kind, dtype);
  for (int64_t size : {int64_t(1), int64_t(33), num_tokens})
    expect(read_prompt(model, num_tokens, size, 2) == whole, "chunks change a prompt: kind, dtype, size", kind, dtype,
           size);
}

const Shape kShapes[] = {
    {35, 3, 1, 7, 16, 0, kNoNorm, 0, 0, 1, false, true, false},
    {64, 4, 2, 16, 48, 6, kNormOfHeads, 2, 30, 1, true, true, true},
    {33, 2, 2, 33, 32, 600, kNormOfRows, 1, 0, 0.5f, false, false, false},
};

template <class T>
void check_step(const Shape& shape, int64_t kind, int64_t dtype) {
  const std::vector<int64_t> lengths = {1, 700, 5, 30, 12, 9, 2};
  const int64_t num_rows = int64_t(lengths.size());
  Model<T> model(shape, kind, dtype, lengths);
  const std::vector<float> together = model.run(0, num_rows, 1);
  for (float number : together) expect(std::isfinite(number), "not finite: kind, dtype", kind, dtype);
  for (int64_t num_threads : {2, 5})
    expect(model.run(0, num_rows, num_threads) == together, "threads change a step: kind, dtype, threads", kind, dtype,
           num_threads);
  for (int64_t row = 0; row < num_rows; row++) {
    const std::vector<float> alone = model.run(row, 1, row % 2 + 1);
    expect(memcmp(alone.data(), &together[size_t(row * kVocab)], sizeof(float) * kVocab) == 0,
           "a row differs alone: kind, dtype, row", kind, dtype, row);
  }
}

}  // namespace

void check_steps() {
  for (const Shape& shape : kShapes)
    for (int64_t kind = 0; kind < 5; kind++) {
      check_step<float>(shape, kind, kFloat32);
      check_step<bf16>(shape, kind, kBfloat16);
      check_step<f16>(shape, kind, kFloat16);
      check_prompt<float>(shape, kind, kFloat32);
      check_prompt<bf16>(shape, kind, kBfloat16);
      check_prompt<f16>(shape, kind, kFloat16);
    }
  Model<float> model(kShapes[0], kDense32, kFloat32, {9, 5, 7});
  for (auto* numbers : {&model.token_ids, &model.slots, &model.tables, &model.positions})
    for (int64_t wrong : {int64_t(-1), int64_t(1) << 40}) {
      Status status;
      const int64_t kept = numbers->front();
      numbers->front() = wrong;
      model.run(0, 3, 2, &status);
      expect(status == kOutOfRange, "a step beyond its tables", wrong);
      numbers->front() = kept;
    }
}

Status step_once(int64_t num_threads) {
  Model<bf16> model(kShapes[1], kInt4, kBfloat16, {3, 700, 20});
  Status status;
  model.run(0, 3, num_threads, &status);
  return status;
}

}  // namespace ss
