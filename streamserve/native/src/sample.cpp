// The draws of a step's rows: the same as those of engine/model/sampler.py, which says how and why.
//
//     weight = exp((logit - largest) / temperature), 0 below the k-th logit;  noise = -log1p(-u), u by seed, position, id
//     token  = argmax weight / noise, where weight >= min_p, and within the nucleus of top_p
//
// As noise >= u, weight / noise <= weight / u: a logarithm is taken only where weight > best * u, which is a few dozen
// ids of a vocabulary. A winner outside the nucleus is followed by the best among what is likelier than it.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "abi.h"
#include "parallel.h"
#include "vec_math.h"

using namespace ss;

namespace {

constexpr int64_t kBlock = 64;                 // ids that are looked at together
constexpr float kSlack = 1 - 0x1p-20f;         // for the rounding of noise and quotient
constexpr float kMostUniform = 1 - 0x1p-24f;   // the largest float below 1

// What one row asks for. A temperature of 0 is greedy; a top_k of 0 is none.
struct Wish {
  float temperature, top_p, min_p;
  int64_t top_k;
  uint32_t key, factor;
};

struct Best {
  float score;
  int64_t id;

  void offer(float other, int64_t other_id) {
    if (other > score || (other == score && other_id < id)) score = other, id = other_id;
  }
};

// 31 random bits of each id of a block: the hash `lowbias32` with shifts that keep the sign. Written for the compiler to
// vectorise.
inline void random_bits(int64_t first_id, const Wish& wish, int32_t* bits) {
  for (int64_t i = 0; i < kBlock; i++) {
    int32_t x = int32_t(uint32_t(first_id + i) * 0x9e3779b9u);
    x ^= x >> 16;
    x = int32_t(uint32_t(x) * 0x7feb352du);
    x ^= x >> 15;
    x = int32_t((uint32_t(x) ^ wish.key) * wish.factor);
    x ^= x >> 16;
    x = int32_t(uint32_t(x) * 0x846ca68bu);
    x ^= x >> 15;
    bits[i] = x & 0x7fffffff;
  }
}

inline float uniform(int32_t bits) { return (float(bits) + 0.5f) * 0x1p-31f; }
inline float noise(int32_t bits) { return -std::log1p(-std::min(uniform(bits), kMostUniform)); }

// The largest number; `is_finite` as of the maximum in torch: NaN wins it.
float largest_of(const float* x, int64_t count, bool& is_finite) {
  Vec high = broadcast(-kInfinity);
  Ints is_nan = {};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Vec values = load(x + i);
    is_nan |= (Lanes)values.v != (Lanes)values.v;
    high = max(values, high);
  }
  float most = largest(high);
  bool has_nan = false;
  for (int lane = 0; lane < kWidth; lane++) has_nan |= is_nan[lane] != 0;
  for (; i < count; i++) {
    has_nan |= x[i] != x[i];
    most = std::max(most, x[i]);
  }
  is_finite = !has_nan && std::isfinite(most);
  return most;
}

int64_t first_place(const float* x, int64_t count, float value) {
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t end = std::min(count, i + kBlock);
    int found = 0;
    for (int64_t j = i; j < end; j++) found |= x[j] == value;
    for (int64_t j = i; found && j < end; j++)
      if (x[j] == value) return j;
  }
  return 0;
}

// A row's draw. Memory of one thread; weights are padded to whole blocks with zeros.
class Drawer {
 public:
  explicit Drawer(int64_t vocab_size)
      : vocab_size_(vocab_size), num_blocks_((vocab_size + kBlock - 1) / kBlock), weights_(num_blocks_ * kBlock) {}

  int64_t draw(const float* logits, float most, const Wish& wish) {
    const bool is_limited = wish.top_k > 0 && wish.top_k < vocab_size_;
    weigh(logits, most, wish.temperature, is_limited ? kth_largest(logits, wish.top_k) : -kInfinity);
    const int64_t likeliest = first_place(logits, vocab_size_, most);
    if (wish.top_p >= 1) return winner(wish, -1, likeliest);
    const float budget = wish.top_p * sum_above(-1);
    for (float cut = -1;;) {
      const int64_t id = winner(wish, cut, likeliest);
      const float own = weights_[id];
      if (!(own > cut) || sum_above(own) < budget) return id;
      cut = own;
    }
  }

 private:
  int64_t vocab_size_, num_blocks_;
  std::vector<float> weights_, kept_;

  void weigh(const float* logits, float most, float temperature, float least) {
    const Vec scale = broadcast(temperature), high = broadcast(most);
    map(weights_.data(), logits, vocab_size_, [&](Vec x) {
      const Vec weight = exp((x - high) / scale);
      return Vec{(decltype(x.v))((Lanes)x.v < least ? lanes(0) : (Lanes)weight.v)};
    });
    std::fill(weights_.begin() + vocab_size_, weights_.end(), 0.0f);
  }

  // The k-th largest of the blocks' maxima is no larger than the k-th largest logit: what is below it is not looked at.
  float kth_largest(const float* logits, int64_t k) {
    float bound = -kInfinity;
    if (k <= num_blocks_) {
      kept_.resize(num_blocks_);
      for (int64_t block = 0; block < num_blocks_; block++)
        kept_[block] = *std::max_element(logits + block * kBlock, logits + std::min(vocab_size_, (block + 1) * kBlock));
      bound = take_kth(k);
    }
    kept_.clear();
    for (int64_t i = 0; i < vocab_size_; i++)
      if (logits[i] >= bound) kept_.push_back(logits[i]);
    return take_kth(k);
  }

  float take_kth(int64_t k) {
    std::nth_element(kept_.begin(), kept_.begin() + (k - 1), kept_.end(), [](float a, float b) { return a > b; });
    return kept_[k - 1];
  }

  float sum_above(float cut) const {
    double total = 0;
    const Vec least = broadcast(cut);
    for (int64_t block = 0; block < num_blocks_; block++) {
      Vec part = zero();
      for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kWidth) {
        const Lanes x = (Lanes)load(&weights_[i]).v;
        part = part + Vec{(decltype(part.v))(x > (Lanes)least.v ? x : lanes(0))};
      }
      total += sum(part);
    }
    return float(total);
  }

  // The best score of the ids whose weight is above `cut` and at least min_p.
  int64_t winner(const Wish& wish, float cut, int64_t likeliest) const {
    int32_t bits[kBlock];
    random_bits(likeliest / kBlock * kBlock, wish, bits);
    Best best{weights_[likeliest] / noise(bits[likeliest % kBlock]), likeliest};
    for (int64_t block = 0; block < num_blocks_; block++) {
      const float* weights = &weights_[block * kBlock];
      random_bits(block * kBlock, wish, bits);
      const float threshold = best.score * kSlack;
      int any = 0;
      for (int64_t i = 0; i < kBlock; i++) any |= weights[i] >= threshold * uniform(bits[i]);
      for (int64_t i = 0; any && i < kBlock; i++) {
        if (weights[i] < best.score * kSlack * uniform(bits[i])) continue;
        if (weights[i] > cut && weights[i] >= wish.min_p && weights[i] > 0)
          best.offer(weights[i] / noise(bits[i]), block * kBlock + i);
      }
    }
    return best.id;
  }
};

Wish wish_of(const DrawCall& call, int64_t row) {
  const float* shape = call.shapes + row * 3;
  const int64_t* key = call.keys + row * 3;
  return {shape[0], shape[1], shape[2], key[0], uint32_t(key[1]), uint32_t(key[2])};
}

}  // namespace

Status ss_draw(const DrawCall* call, int64_t num_threads) {
  return status_of([&] {
    std::atomic<int64_t> next{0};
    parallel(std::min(num_threads, call->num_rows), [&](Team) {
      Drawer drawer(call->vocab_size);
      for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < call->num_rows;) {
        const float* logits = call->logits + row * call->row_stride;
        const Wish wish = wish_of(*call, row);
        bool is_finite;
        const float most = largest_of(logits, call->vocab_size, is_finite);
        call->is_finite[row] = is_finite;
        if (!is_finite || wish.temperature <= 0) call->token_ids[row] = first_place(logits, call->vocab_size, most);
        else call->token_ids[row] = drawer.draw(logits, most, wish);
      }
    });
  });
}
