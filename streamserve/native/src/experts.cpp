// Experts: see experts.h.
#include "experts.h"

#include <algorithm>
#include <vector>

#include "inputs.h"
#include "linear.h"
#include "scratch.h"
#include "step_parts.h"

using namespace ss;

namespace {

constexpr int64_t kMostBytes = 64 << 20;  // of memory that a pass shares: more rows are several passes
constexpr int64_t kPiecesAThread = 4, kLeastPanels = 4;
constexpr int64_t kProductsAThread = 65536;  // so many are worth another thread

// Write the numbers of the num_taken experts with the largest logits, and their shares, by the experts' numbers.
void route(const Experts& experts, const float* logits, int64_t* chosen, float* shares) {
  int64_t count = 0;
  for (int64_t expert = 0; expert < experts.num_experts; expert++) {  // the largest first, of equals the first
    const float logit = logits[expert];
    if (count == experts.num_taken && !(logit > shares[count - 1])) continue;
    if (count < experts.num_taken) count++;
    int64_t place = count - 1;
    for (; place > 0 && logit > shares[place - 1]; place--)
      shares[place] = shares[place - 1], chosen[place] = chosen[place - 1];
    shares[place] = logit, chosen[place] = expert;
  }
  const float most = shares[0];
  float of_taken = 0, of_all = 0;
  for (int64_t i = 0; i < count; i++) of_taken += shares[i] = std::exp(shares[i] - most);
  if (experts.routing == kSoftmaxAll)
    for (int64_t i = 0; i < experts.num_experts; i++) of_all += std::exp(logits[i] - most);
  for (int64_t i = 0; i < count; i++) {
    shares[i] /= experts.routing == kSoftmaxAll ? of_all : of_taken;
    if (experts.expert_scale) shares[i] *= experts.expert_scale[chosen[i]];
  }
  for (int64_t i = 1; i < count; i++)
    for (int64_t place = i; place > 0 && chosen[place] < chosen[place - 1]; place--)
      std::swap(chosen[place], chosen[place - 1]), std::swap(shares[place], shares[place - 1]);
}

// The pairs of a batch, sorted by expert. Each thread makes it for itself.
struct Pairs {
  std::vector<int64_t> active;   // experts that a row takes
  std::vector<int64_t> first;    // (num_experts + 1,): an expert's pairs begin here
  std::vector<int64_t> row_of;   // of a sorted pair
  std::vector<int64_t> place;    // (num_rows, num_taken): where it is among the sorted pairs

  void sort(const Experts& experts, const int64_t* chosen, int64_t num_rows) {
    const int64_t num_pairs = num_rows * experts.num_taken;
    first.assign(experts.num_experts + 1, 0);
    for (int64_t i = 0; i < num_pairs; i++) first[chosen[i] + 1]++;
    active.clear();
    for (int64_t expert = 0; expert < experts.num_experts; expert++) {
      if (first[expert + 1]) active.push_back(expert);
      first[expert + 1] += first[expert];
    }
    next_.assign(first.begin(), first.end());
    row_of.resize(num_pairs), place.resize(num_pairs);
    for (int64_t i = 0; i < num_pairs; i++) row_of[place[i] = next_[chosen[i]]++] = i / experts.num_taken;
  }
  int64_t count(int64_t expert) const { return first[expert + 1] - first[expert]; }

 private:
  std::vector<int64_t> next_;
};

// One thread's share of a pass.
class ExpertsThread {
 public:
  ExpertsThread(const Experts& experts, Team team, ExpertsMemory& memory, int64_t num_rows)
      : experts_(experts), team_(team), memory_(memory), num_rows_(num_rows), rows_(team.part(num_rows)) {}

  void run(const Rows& x, const Outputs& y) {
    static thread_local Pairs pairs;
    prepare(x);
    const Linear& router = experts_.router;
    multiply(router, memory_.router_inputs, num_rows_, team_.part(router.num_panels()),
             Outputs{memory_.logits, kFloat32, experts_.num_experts});
    team_.barrier();
    for (int64_t row = rows_.begin; row < rows_.end; row++)
      route(experts_, memory_.logits + row * experts_.num_experts, memory_.chosen + row * experts_.num_taken,
            memory_.shares + row * experts_.num_taken);
    team_.barrier();
    pairs.sort(experts_, memory_.chosen, num_rows_);
    each_piece(memory_.next_inner, inner() / kLanes, pairs,
               [&](int64_t expert, Range panels) { compute_inner(pairs, expert, panels); });
    team_.barrier();
    each_piece(memory_.next_output, experts_.down[0].num_panels(), pairs,
               [&](int64_t expert, Range panels) { compute_outputs(pairs, expert, panels); });
    team_.barrier();
    for (int64_t row = rows_.begin; row < rows_.end; row++) combine(pairs, row, y);
  }

 private:
  const Experts& experts_;
  Team team_;
  ExpertsMemory& memory_;
  int64_t num_rows_;
  Range rows_;

  int64_t hidden() const { return experts_.router.num_inputs; }
  int64_t inner() const { return experts_.down[0].num_inputs; }

  void prepare(const Rows& x) {
    float* row_floats = reinterpret_cast<float*>(scratch<kExpertRow>(2 * round_up(hidden(), kGroup) * 4));
    float* normal = row_floats + round_up(hidden(), kGroup);
    if (team_.thread == 0) memory_.next_inner = memory_.next_output = 0;
    for (int64_t row = rows_.begin; row < rows_.end; row++) {
      with_type(x.dtype, [&](auto number) {
        const auto* from = static_cast<const decltype(number)*>(x.data) + row * x.stride;
        map(row_floats, from, hidden(), [](Vec v) { return v; });
      });
      prepare_normal(experts_.router, row_floats, experts_.router_norm, normal, row, memory_.router_inputs);
      prepare_normal(experts_.gate_up[0], row_floats, experts_.norm, normal, row, memory_.inputs);
    }
    team_.barrier();
  }

  void prepare_normal(const Linear& linear, const float* x, const float* norm, float* normal, int64_t row,
                      uint8_t* inputs) const {
    if (norm) rms_norm(x, norm, hidden(), experts_.eps, normal);
    prepare_row(linear.kind, hidden(), norm ? normal : x, inputs + row * input_stride(linear.kind, hidden()));
  }

  // Call body(expert, panels) for pieces of all active experts, until none is left.
  template <class Body>
  void each_piece(std::atomic<int64_t>& next, int64_t num_panels, const Pairs& pairs, const Body& body) const {
    const int64_t num_active = int64_t(pairs.active.size());
    const int64_t wanted = (kPiecesAThread * team_.num_threads + num_active - 1) / num_active;
    const int64_t most = (num_panels + kLeastPanels - 1) / kLeastPanels;
    const int64_t pieces = team_.num_threads == 1 ? 1 : std::min(wanted, most);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_active * pieces;)
      body(pairs.active[i / pieces], Team{i % pieces, pieces, nullptr}.part(num_panels, kLeastPanels));
  }

  // The same columns of gate and up, multiplied there: act(gate) * up takes the place of gate.
  void compute_inner(const Pairs& pairs, int64_t expert, Range panels) const {
    const Linear& linear = experts_.gate_up[expert];
    const int64_t count = pairs.count(expert), stride = input_stride(linear.kind, hidden()), num_panels = inner() / kLanes;
    const int64_t* rows = pairs.row_of.data() + pairs.first[expert];
    uint8_t* inputs = scratch<kExpertInputs>(count * stride);
    for (int64_t i = 0; i < count; i++) memcpy(inputs + i * stride, memory_.inputs + rows[i] * stride, size_t(stride));
    float* both = memory_.both + pairs.first[expert] * 2 * inner();
    const Outputs outputs{both, kFloat32, 2 * inner()};
    multiply(linear, inputs, count, panels, outputs);
    multiply(linear, inputs, count, {panels.begin + num_panels, panels.end + num_panels}, outputs);
    for (int64_t i = 0; i < count; i++) {
      float* gates = both + i * 2 * inner() + panels.begin * kLanes;
      const int64_t width = (panels.end - panels.begin) * kLanes;
      if (experts_.limit > 0) gate_clamped(experts_.limit, experts_.alpha, gates, gates + inner(), width);
      else gate(experts_.activation, gates, gates + inner(), width);
    }
  }

  void compute_outputs(const Pairs& pairs, int64_t expert, Range panels) const {
    const Linear& linear = experts_.down[expert];
    const int64_t count = pairs.count(expert), first = pairs.first[expert], stride = input_stride(linear.kind, inner());
    uint8_t* inputs = scratch<kExpertInputs>(count * stride);
    for (int64_t i = 0; i < count; i++)
      prepare_row(linear.kind, inner(), memory_.both + (first + i) * 2 * inner(), inputs + i * stride);
    multiply(linear, inputs, count, panels, Outputs{memory_.outputs + first * hidden(), kFloat32, hidden()});
  }

  void combine(const Pairs& pairs, int64_t row, const Outputs& y) const {
    float* total = reinterpret_cast<float*>(scratch<kExpertRow>(hidden() * 4));
    std::fill_n(total, hidden(), 0.0f);
    for (int64_t pair = row * experts_.num_taken; pair < (row + 1) * experts_.num_taken; pair++) {
      const float* output = memory_.outputs + pairs.place[pair] * hidden();
      const float share = memory_.shares[pair];
      for (int64_t i = 0; i < hidden(); i++) total[i] += share * output[i];
    }
    if (experts_.after_norm) rms_norm(total, experts_.after_norm, hidden(), experts_.eps, total);
    with_type(y.dtype, [&](auto number) {
      auto* to = static_cast<decltype(number)*>(y.data) + row * y.stride;
      map(to, total, hidden(), [](Vec v) { return v; });
    });
  }
};

// Parts of a piece of memory, one after the other; addresses are null where there is none yet.
struct Layout {
  uint8_t* data;
  int64_t size = 0;

  template <class T>
  T* take(int64_t count) {
    const int64_t at = size;
    size += round_up(count * int64_t(sizeof(T)), 64);
    return data ? reinterpret_cast<T*>(data + at) : nullptr;
  }
};

}  // namespace

ss::ExpertsMemory::ExpertsMemory(const Experts& experts, int64_t num_rows, uint8_t* data) {
  Layout layout{data};
  const int64_t hidden = experts.router.num_inputs, inner = experts.down[0].num_inputs;
  const int64_t num_pairs = num_rows * experts.num_taken;
  router_inputs = layout.take<uint8_t>(num_rows * input_stride(experts.router.kind, hidden));
  inputs = layout.take<uint8_t>(num_rows * input_stride(experts.gate_up[0].kind, hidden));
  logits = layout.take<float>(num_rows * experts.num_experts);
  shares = layout.take<float>(num_pairs);
  chosen = layout.take<int64_t>(num_pairs);
  both = layout.take<float>(num_pairs * 2 * inner);
  outputs = layout.take<float>(num_pairs * hidden);
  num_bytes = layout.size;
}

int64_t ss::experts_bytes(const Experts& experts, int64_t num_rows) {
  return ExpertsMemory(experts, num_rows, nullptr).num_bytes;
}

void ss::run_experts(const Experts& experts, Team team, ExpertsMemory& memory, const Rows& x, int64_t num_rows,
                     const Outputs& y) {
  ExpertsThread(experts, team, memory, num_rows).run(x, y);
}

Status ss_experts(const Experts* experts, int64_t dtype, const void* x, int64_t num_rows, void* y, int64_t num_threads) {
  return status_of([&] {
    const int64_t hidden = experts->router.num_inputs, row_bytes = hidden * (dtype == kFloat32 ? 4 : 2);
    const int64_t rows_a_pass = std::max<int64_t>(1, num_rows * kMostBytes / (experts_bytes(*experts, num_rows) + 1));
    const int64_t products = 3 * experts->num_taken * experts->down[0].num_inputs * hidden;
    for (int64_t begin = 0; begin < num_rows; begin += rows_a_pass) {
      const int64_t count = std::min(rows_a_pass, num_rows - begin);
      ExpertsMemory memory(*experts, count, scratch<kExperts>(experts_bytes(*experts, count)));
      const Rows from{static_cast<const uint8_t*>(x) + begin * row_bytes, dtype, hidden};
      const Outputs to{static_cast<uint8_t*>(y) + begin * row_bytes, dtype, hidden};
      parallel(std::min(num_threads, 1 + count * products / kProductsAThread),
               [&](Team team) { run_experts(*experts, team, memory, from, count, to); });
    }
  });
}
