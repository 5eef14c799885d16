#include "programs/trainer/data/batches.h"

#include "programs/trainer/model/transformer.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace programs {
namespace {

constexpr int64_t kHeldOutPeriod = 20;  // the last window of so many is held out

// The finaliser of splitmix64: a bijection that scatters neighbouring numbers.
uint64_t scatter(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// A Feistel network over numbers of 2 * `half` bits: a bijection, whatever the rounds do.
uint64_t permuted(uint64_t x, int half, uint64_t key) {
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t left = x >> half, right = x & mask;
  for (uint64_t round = 0; round < 4; ++round)
    left = std::exchange(right, left ^ (scatter(right ^ scatter(key + round)) & mask));
  return left << half | right;
}

}  // namespace

// Numbers that leave the range go round until they are in it (cycle walking; Black and
// Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
int64_t shuffled(int64_t index, int64_t count, uint64_t key) {
  int half = 1;
  while (int64_t{1} << (2 * half) < count) ++half;
  auto place = static_cast<uint64_t>(index);
  do place = permuted(place, half, key);
  while (place >= static_cast<uint64_t>(count));
  return static_cast<int64_t>(place);
}

// A window's last target is the next one's first input.
Batches::Batches(std::unique_ptr<Tokens> text, BatchOptions options)
    : text_(std::move(text)), options_(options) {
  const int64_t windows = (text_->size() - 1) / options_.tokens;
  TORCH_CHECK_VALUE(windows >= kHeldOutPeriod, "--tokens: the text has ", text_->size(),
                    " tokens, which are ", windows, " sequences of ", options_.tokens,
                    "; at least ", kHeldOutPeriod, " are needed");
  held_out_windows_ = windows / kHeldOutPeriod;
  training_windows_ = windows - held_out_windows_;
}

template <class WindowOf>
Batch Batches::cut(const BatchRows& rows, const WindowOf& window_of) const {
  std::vector<at::Tensor> windows;
  for (int64_t row = rows.first; row < rows.first + rows.count; ++row)
    windows.push_back(
        text_->read(window_of(row) * options_.tokens, options_.tokens + 1, options_.vocab));
  const auto both = at::stack(windows);
  Batch batch{both.narrow(1, 0, options_.tokens).contiguous(),
              both.narrow(1, 1, options_.tokens).contiguous()};
  batch.target_count = batch.targets.numel();
  if (options_.packing == Packing::kSeparate) separate(batch, rows, window_of);
  return batch;
}

std::vector<int64_t> Batches::begins_in(int64_t window) const {
  auto begins = text_->document_begins(window * options_.tokens, options_.tokens + 1);
  for (auto& begin : begins) begin -= window * options_.tokens;
  return begins;
}

// Each document that begins after a window's first token takes a target away.
template <class WindowOf>
void Batches::separate(Batch& batch, const BatchRows& rows, const WindowOf& window_of) const {
  batch.begins = at::zeros({rows.count, options_.tokens}, at::kBool);
  auto begins = batch.begins.accessor<bool, 2>();
  batch.targets = batch.targets.clone();  // it may share memory with the inputs
  auto targets_of = batch.targets.accessor<int64_t, 2>();
  for (int64_t row = 0; row < rows.count; ++row) {
    for (const int64_t begin : begins_in(window_of(rows.first + row))) {
      if (begin < options_.tokens) begins[row][begin] = true;
      if (begin == 0) continue;
      targets_of[row][begin - 1] = kNoTarget;
      --batch.target_count;
    }
  }
}

Batch Batch::to(c10::Device device) const {
  auto batch = *this;
  for (auto* const tensor : {&batch.inputs, &batch.targets, &batch.begins})
    if (tensor->defined()) *tensor = tensor->to(device);
  return batch;
}

Batch Batches::training(int64_t step, const BatchRows& rows) const {
  return cut(rows, [&](int64_t row) {
    const int64_t number = (step - 1) * rows.global + row, epoch = number / training_windows_;
    const auto place = shuffled(number % training_windows_, training_windows_,
                                scatter(options_.seed) + static_cast<uint64_t>(epoch));
    return place + place / (kHeldOutPeriod - 1);
  });
}

Batch Batches::held_out(int64_t index, const BatchRows& rows) const {
  return cut(rows, [&](int64_t row) {
    const int64_t number = (index * rows.global + row) % held_out_windows_;
    return number * kHeldOutPeriod + kHeldOutPeriod - 1;
  });
}

}  // namespace programs
