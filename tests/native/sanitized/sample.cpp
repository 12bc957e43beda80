// Draws: ids of the vocabulary, the largest where that is asked for. tests/native/test_sample.py has the distributions.
#include <algorithm>
#include <cmath>

#include "check.h"

namespace ss {
namespace {

struct Rows {
  int64_t vocab_size, num_rows = 0;
  std::vector<float> logits, shapes;
  std::vector<int64_t> keys, token_ids;
  std::vector<uint8_t> is_finite;
  Numbers numbers;

  explicit Rows(int64_t size) : vocab_size(size) {}

  void add(float temperature, float top_p, float min_p, int64_t top_k) {
    num_rows++;
    for (int64_t i = 0; i < vocab_size; i++) logits.push_back(numbers.next() * 4);
    shapes.insert(shapes.end(), {temperature, top_p, min_p});
    keys.insert(keys.end(), {top_k, 12345 + num_rows, 67891});
  }
  Status draw(int64_t num_threads) {
    token_ids.assign(size_t(num_rows), -1);
    is_finite.assign(size_t(num_rows), 9);
    const DrawCall call{logits.data(),    shapes.data(), keys.data(), token_ids.data(),
                        is_finite.data(), num_rows,      vocab_size,  vocab_size};
    const Limited limited;
    return ss_draw(&call, num_threads);
  }
};

}  // namespace

void check_draws() {
  for (int64_t vocab_size : {1, 7, 63, 64, 65, 1000, 4096}) {
    Rows rows(vocab_size);
    for (float temperature : {0.0f, 0.7f})
      for (float top_p : {1.0f, 0.9f, 0.01f})
        for (float min_p : {0.0f, 0.1f})
          for (int64_t top_k : {int64_t(0), int64_t(1), int64_t(5), int64_t(70), vocab_size, vocab_size + 1})
            rows.add(temperature, top_p, min_p, top_k);
    rows.add(1, 1, 0, 0);
    rows.logits.back() = NAN;
    rows.draw(1);
    const std::vector<int64_t> alone = rows.token_ids;
    for (int64_t num_threads : {2, 5}) {
      rows.draw(num_threads);
      expect(rows.token_ids == alone, "threads change draws", vocab_size, num_threads);
    }
    for (int64_t row = 0; row < rows.num_rows; row++) {
      const int64_t id = alone[size_t(row)];
      expect(id >= 0 && id < vocab_size, "no id of the vocabulary", vocab_size, row, id);
      const bool is_last = row == rows.num_rows - 1;
      expect(rows.is_finite[size_t(row)] == (is_last ? 0 : 1), "a wrong flag", vocab_size, row);
      const auto first = rows.logits.begin() + row * vocab_size;
      if (!is_last && rows.shapes[size_t(row * 3)] == 0)
        expect(id == std::max_element(first, first + vocab_size) - first, "not the largest", vocab_size, row);
    }
  }
}

Status draw_once(int64_t num_threads) {
  Rows rows(3000);
  for (int64_t row = 0; row < 5; row++) rows.add(1, 0.9f, 0, row % 2 ? 40 : 0);
  return rows.draw(num_threads);
}

}  // namespace ss
