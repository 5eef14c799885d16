#include "dtensor/strategy/empty_parts.h"

#include "dtensor/layout/shard_layout.h"

namespace fsdp::internal {
namespace {

// Of chunks, the last is the smallest; of parts with local_units, any.
bool leaves_a_part_empty(const Operand& operand, const Placement& placement, int64_t parts) {
  if (!operand.is_present() || !placement.is_shard()) return false;
  const auto& units = placement.shard().local_units;
  for (int64_t i = 0; units.has_value() && i < parts; ++i)
    if (units.at(i) == 0) return true;
  const int64_t atoms = atoms_of(placement.shard(), operand.size(placement.shard_dim()));
  return chunk_of(atoms, parts, parts - 1).length == 0;
}

bool leaves_a_part_empty(const PlacementStrategy& strategy, const OpSchema& call) {
  for (size_t i = 0; i < strategy.operands.size(); ++i) {
    if (leaves_a_part_empty(call.operands[i], strategy.operands[i], call.parts)) return true;
  }
  return false;
}

}  // namespace

std::vector<PlacementStrategy> without_empty_parts(std::vector<PlacementStrategy> strategies,
                                                   const OpSchema& call) {
  std::erase_if(strategies, [&](const PlacementStrategy& strategy) {
    return !strategy.takes_empty_parts && leaves_a_part_empty(strategy, call);
  });
  return strategies;
}

}  // namespace fsdp::internal
