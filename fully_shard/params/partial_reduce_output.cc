#include "fully_shard/params/partial_reduce_output.h"

#include <algorithm>
#include <utility>

namespace fsdp::internal {

PartialReduceOutput::PartialReduceOutput(size_t param_count, const GroupAccounts& accounts)
    : accounts_(accounts), parts_(param_count) {}

PartialReduceOutput::~PartialReduceOutput() {
  for (size_t i = 0; i < parts_.size(); ++i) drop(static_cast<int64_t>(i));
}

bool PartialReduceOutput::has_any() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const auto& kept) { return kept.defined(); });
}

void PartialReduceOutput::keep(int64_t index, const at::Tensor& part) {
  auto& kept = parts_[static_cast<size_t>(index)];
  if (kept.defined()) {
    kept.add_(part);
    return;
  }
  kept = part.clone();
  accounts_.add(&Counters::gradient_bytes, static_cast<int64_t>(kept.nbytes()));
}

void PartialReduceOutput::drop(int64_t index) {
  const auto kept = std::exchange(parts_[static_cast<size_t>(index)], {});
  if (kept.defined())
    accounts_.add(&Counters::gradient_bytes, -static_cast<int64_t>(kept.nbytes()));
}

void PartialReduceOutput::add_to(ReduceScatterInput& input, at::Tensor& row) {
  for (size_t i = 0; i < input.params().size(); ++i) {
    const auto index = input.params()[i].index;
    if (!has(index)) continue;
    input.add_part(row, static_cast<int64_t>(i), parts_[static_cast<size_t>(index)]);
    drop(index);
  }
}

}  // namespace fsdp::internal
