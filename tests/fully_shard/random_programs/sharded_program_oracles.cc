// What oracles need to know of a sharded program.
#include "tests/fully_shard/random_programs/sharded_program.h"

namespace fsdp::testing {

std::vector<ResidencyOracle::ObservedUnit> ShardedProgram::observed_units() const {
  std::vector<ResidencyOracle::ObservedUnit> observed;
  for (const auto& unit : units_) {
    const auto& spec = unit.nodes.front()->unit;
    observed.push_back({.unit = internal::unit_of(unit.module).get(),
                        .name = "unit of n" + std::to_string(unit.nodes.front()->id),
                        .spec = {.parent = unit.parent,
                                 .reshard_after_forward = spec.reshard_after_forward,
                                 .reshard_after_backward = spec.reshard_after_backward},
                        .calls = unit.calls,
                        .keeps_pieces = spec.to_halves});
  }
  for (const auto& [id, unit] : unit_of_tensor_) {
    const auto& param = *find_param(program_, id);
    const auto dtype = reduced_in(units_[unit].nodes.front()->unit.precision, param.dtype);
    observed[unit].spec.params.push_back(
        {.id = id, .dtype = static_cast<int>(dtype), .trainable = !param.frozen});
  }
  return observed;
}

PrefetchRule ShardedProgram::prefetch_rule() const {
  PrefetchRule rule{.after_gradients = program_.prefetch_after_gradients};
  for (size_t i = 0; i < units_.size(); ++i) {
    if (!units_[i].nodes.front()->unit.unshard_in_backward) rule.never.insert(static_cast<int>(i));
  }
  return rule;
}

}  // namespace fsdp::testing
