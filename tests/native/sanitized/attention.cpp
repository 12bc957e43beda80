// Attention over block tables: decodes against the plain sum, prompts against decodes, and the writing of slots.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "kv_int8.h"

namespace ss {
namespace {

struct Shape {
  int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size, window;
  float softcap;
  bool has_sinks;
};

// A pool of `num_slots` vectors in all.
template <class Kv>
std::vector<Kv> pool(Numbers& numbers, int64_t num_slots, int64_t dim) {
  if constexpr (!kIsInt8<Kv>) {
    return numbers.vector<Kv>(num_slots * dim);
  } else {
    std::vector<Kv> out(size_t(num_slots * row_stride<Kv>(dim)));
    for (int64_t slot = 0; slot < num_slots; slot++)
      store_vector(numbers.vector<float>(dim).data(), dim, &out[size_t(slot * row_stride<Kv>(dim))]);
    return out;
  }
}

// Number `d` of a slot's vector.
template <class Kv>
double number_of(const std::vector<Kv>& pool, int64_t slot, int64_t dim, int64_t d) {
  const Kv* row = &pool[size_t(slot * row_stride<Kv>(dim))];
  if constexpr (kIsInt8<Kv>) return double(to_float(row[d])) * scale_of(row, dim);
  return to_float(row[d]);
}

// One call, in buffers without a byte to spare.
template <class T, class Kv = T>
struct Case {
  DecodeCall call{};
  std::vector<T> query, out;
  std::vector<Kv> keys, values;
  std::vector<int64_t> positions, tables;
  std::vector<float> sinks;

  Case(const Shape& shape, std::vector<int64_t> lengths) {
    Numbers numbers;
    for (int64_t length : lengths) positions.push_back(length - 1);
    const int64_t num_rows = int64_t(lengths.size());
    const int64_t stride = (*std::max_element(lengths.begin(), lengths.end()) - 1) / shape.block_size + 1;
    const int64_t num_blocks = num_rows * stride, num_slots = num_blocks * shape.block_size;
    for (int64_t i = 0; i < num_blocks; i++) tables.push_back(num_blocks - 1 - i);
    query = numbers.vector<T>(num_rows * shape.num_heads * shape.key_dim);
    keys = pool<Kv>(numbers, shape.num_kv_heads * num_slots, shape.key_dim);
    values = pool<Kv>(numbers, shape.num_kv_heads * num_slots, shape.value_dim);
    sinks = numbers.vector<float>(shape.num_heads);
    out.resize(size_t(num_rows * shape.num_heads * shape.value_dim));
    call.query = query.data(), call.out = out.data(), call.keys = keys.data(), call.values = values.data();
    call.positions = positions.data(), call.tables = tables.data();
    call.sinks = shape.has_sinks ? sinks.data() : nullptr;
    call.query_head_stride = shape.key_dim, call.query_row_stride = shape.num_heads * shape.key_dim;
    call.table_stride = stride, call.num_slots = num_slots, call.num_rows = num_rows;
    call.num_heads = shape.num_heads, call.num_kv_heads = shape.num_kv_heads;
    call.key_dim = shape.key_dim, call.value_dim = shape.value_dim, call.block_size = shape.block_size;
    call.window = shape.window, call.scaling = 0.5f, call.softcap = shape.softcap;
    call.is_int8 = kIsInt8<Kv>;
  }

  // The output of a row's head, number `d`.
  double wanted(int64_t row, int64_t head, int64_t d) const {
    const int64_t position = positions[size_t(row)];
    const int64_t first = call.window > 0 ? std::max<int64_t>(0, position + 1 - call.window) : 0;
    double total = call.sinks ? std::exp(double(sinks[size_t(head)])) : 0, sum = 0;
    for (int64_t i = first; i <= position; i++) {
      const int64_t block = tables[size_t(row * call.table_stride + i / call.block_size)];
      const int64_t slot = head / (call.num_heads / call.num_kv_heads) * call.num_slots + block * call.block_size +
                           i % call.block_size;
      double score = 0;
      for (int64_t k = 0; k < call.key_dim; k++)
        score += double(to_float(query[size_t((row * call.num_heads + head) * call.key_dim + k)])) *
                 number_of(keys, slot, call.key_dim, k);
      score *= call.scaling;
      if (call.softcap > 0) score = std::tanh(score / call.softcap) * call.softcap;
      total += std::exp(score);
      sum += std::exp(score) * number_of(values, slot, call.value_dim, d);
    }
    return sum / total;
  }
};

template <class T, class Kv = T>
void check_case(const Shape& shape, int64_t dtype, int64_t num_threads) {
  Case<T, Kv> made(shape, {1, 40, 65, 700});
  ss_attend_decodes(&made.call, dtype, num_threads);
  double most = 0;
  for (int64_t row = 0; row < made.call.num_rows; row++)
    for (int64_t head = 0; head < shape.num_heads; head += shape.num_heads - 1 ? shape.num_heads - 1 : 1)
      for (int64_t d = 0; d < shape.value_dim; d += shape.value_dim - 1 ? shape.value_dim - 1 : 1) {
        const size_t at = size_t((row * shape.num_heads + head) * shape.value_dim + d);
        most = std::max(most, std::fabs(to_float(made.out[at]) - made.wanted(row, head, d)));
      }
  expect(most <= (dtype == kFloat32 ? 1e-4 : 2e-2), "attention differs: heads, dims, dtype, threads", shape.num_heads,
         shape.key_dim, shape.value_dim, dtype, num_threads);
}

// A prompt's rows are bitwise decodes at their positions.
template <class T, class Kv = T>
void check_prompt(const Shape& shape, int64_t dtype, int64_t start, int64_t num_rows, int64_t num_threads) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < num_rows; i++) lengths.push_back(start + i + 1);
  Case<T, Kv> made(shape, lengths);
  for (int64_t i = made.call.table_stride; i < int64_t(made.tables.size()); i++)  // all rows are of the first sequence
    made.tables[size_t(i)] = made.tables[size_t(i % made.call.table_stride)];
  ss_attend_decodes(&made.call, dtype, num_threads);
  const std::vector<int64_t> table(made.tables.begin(), made.tables.begin() + made.call.table_stride);
  std::vector<T> out(made.out.size());
  const DecodeCall& own = made.call;
  PromptCall call{};
  call.query = own.query, call.out = out.data(), call.keys = own.keys, call.values = own.values;
  call.table = table.data(), call.sinks = own.sinks;
  call.query_row_stride = own.query_row_stride, call.query_head_stride = own.query_head_stride;
  call.num_slots = own.num_slots, call.start = start, call.num_rows = num_rows;
  call.num_heads = own.num_heads, call.num_kv_heads = own.num_kv_heads;
  call.key_dim = own.key_dim, call.value_dim = own.value_dim, call.block_size = own.block_size;
  call.window = own.window, call.is_int8 = own.is_int8, call.scaling = own.scaling, call.softcap = own.softcap;
  expect(ss_attend_prompt(&call, dtype, num_threads) == kDone, "a prompt fails", start, num_rows);
  expect(memcmp(out.data(), made.out.data(), out.size() * sizeof(T)) == 0,
         "a prompt is no decode: heads, dims, dtype, start, rows", shape.num_heads, shape.key_dim, shape.value_dim, dtype,
         start, num_rows);
}

template <class T>
void check_slots(int64_t num_heads, int64_t num_tokens, int64_t dim) {
  Numbers numbers;
  const int64_t num_slots = num_tokens + 3, size = int64_t(sizeof(T));
  const std::vector<T> vectors = numbers.vector<T>(num_tokens * num_heads * dim);
  std::vector<T> pool(size_t(num_heads * num_slots * dim));
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < num_tokens; i++) slots.push_back(num_slots - 1 - i);
  const auto write = [&] {
    return ss_write_slots(reinterpret_cast<const char*>(vectors.data()), num_heads * dim * size, dim * size,
                          reinterpret_cast<char*>(pool.data()), num_slots, slots.data(), num_tokens, num_heads,
                          dim * size);
  };
  expect(write() == kDone, "slots are not written", num_heads, num_tokens, dim);
  const size_t last = size_t(((num_heads - 1) * num_slots + slots.back()) * dim + dim - 1);
  expect(to_float(pool[last]) == to_float(vectors.back()), "a slot differs", num_heads, num_tokens, dim);
  slots.back() = num_slots;
  expect(write() == kOutOfRange, "a slot beyond the pool", num_heads, num_tokens, dim);
}

}  // namespace

void check_attention() {
  const Shape shapes[] = {
      {1, 1, 1, 1, 1, 0, 0, false},     {3, 1, 7, 7, 4, 0, 0, true},      {8, 2, 33, 5, 16, 7, 0, false},
      {10, 2, 80, 80, 16, 600, 30, true}, {6, 6, 64, 64, 32, 100, 0, false}, {4, 1, 128, 128, 16, 0, 5, true},
  };
  for (const Shape& shape : shapes)
    for (int64_t num_threads : {1, 2, 5}) {
      check_case<float>(shape, kFloat32, num_threads);
      check_case<bf16>(shape, kBfloat16, num_threads);
      check_case<f16>(shape, kFloat16, num_threads);
      check_prompt<float>(shape, kFloat32, 0, 70, num_threads);
      check_prompt<bf16>(shape, kBfloat16, 500, 45, num_threads);
      check_prompt<f16>(shape, kFloat16, 63, 1, num_threads);
      check_case<float, q8>(shape, kFloat32, num_threads);
      check_case<bf16, q8>(shape, kBfloat16, num_threads);
      check_prompt<float, q8>(shape, kFloat32, 63, 70, num_threads);
      check_prompt<bf16, q8>(shape, kBfloat16, 500, 1, num_threads);
    }
  for (int64_t dim : {1, 7, 64}) {
    check_slots<float>(3, 5, dim);
    check_slots<bf16>(1, 1, dim);
  }
  Case<float> beyond({2, 1, 8, 8, 4, 0, 0, false}, {9, 5});
  beyond.tables[1] = 6;
  expect(ss_attend_decodes(&beyond.call, kFloat32, 2) == kOutOfRange, "a block beyond the pool");
}

Status attend_once(int64_t num_threads) {
  Case<float> made({4, 2, 48, 48, 16, 0, 0, false}, {5, 700, 1200});
  const Limited limited;
  return ss_attend_decodes(&made.call, kFloat32, num_threads);
}

}  // namespace ss
