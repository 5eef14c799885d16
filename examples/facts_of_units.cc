#include "examples/facts_of_units.h"

#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"

#include <algorithm>

namespace examples {
namespace {

constexpr int64_t kAlignment = 64;  // bytes, of a shard in its row

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t padded(int64_t elements, c10::ScalarType dtype) {
  return aligned(elements * static_cast<int64_t>(c10::elementSize(dtype)));
}

// Rank 0 has the longest part of each parameter, so its own says how long rows are.
run_report::UnitFacts facts_of(const fsdp::FSDPModule& unit,
                               const fsdp::MixedPrecisionPolicy& precision, int64_t parts) {
  run_report::UnitFacts facts{.name = unit.is_root() ? "(root)" : unit.name(),
                              .is_root = unit.is_root()};
  int64_t flags = 0;  // of each part of a row: whether anybody used the parameter
  for (const auto& parameter : unit.parameters()) {
    const auto own = parameter.scalar_type();
    const auto computed = precision.param_dtype.value_or(own);
    const auto reduced = precision.reduce_dtype.value_or(computed);
    const auto elements = fsdp::DTensor(parameter).to_local().numel();
    const auto bytes = parts * padded(elements, computed);
    ++facts.parameters;
    facts.bytes += bytes;
    if (!parameter.requires_grad()) continue;
    facts.gradient_bytes += std::max(bytes, parts * padded(elements, reduced));
    flags += static_cast<int64_t>(c10::elementSize(reduced));
  }
  if (flags > 0) facts.gradient_bytes += parts * aligned(flags);
  return facts;
}

}  // namespace

std::vector<run_report::UnitFacts> facts_of_units(torch::nn::Module& model,
                                                  const TrainingOptions& options,
                                                  int64_t data_ranks) {
  const bool cuts_over_all = options.sharding.outer == fsdp::Outer::kShardOptimizer;
  const int64_t parts = cuts_over_all ? data_ranks : data_ranks / options.replicas;
  std::vector<run_report::UnitFacts> units;
  for (const auto& unit : fsdp::fsdp_modules(model)) {
    auto facts = facts_of(unit, options.sharding.mp_policy, parts);
    if (facts.parameters > 0) units.push_back(std::move(facts));
  }
  return units;
}

}  // namespace examples
