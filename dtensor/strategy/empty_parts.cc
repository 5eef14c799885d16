#include "dtensor/strategy/empty_parts.h"

#include "dtensor/layout/shard_layout.h"

namespace fsdp::internal {
namespace {

// Of chunks, the last is the smallest.
bool leaves_a_part_empty(const Operand& operand, const Placement& placement, int64_t parts) {
  if (!operand.is_present() || !placement.is_shard()) return false;
  const int64_t atoms = atoms_of(placement.shard(), operand.size(placement.shard_dim()));
  return chunk_of(atoms, parts, parts - 1).length == 0;
}

bool leaves_a_part_empty(const Way& way, const CallGeometry& call) {
  for (size_t i = 0; i < way.operands.size(); ++i) {
    if (leaves_a_part_empty(call.operands[i], way.operands[i], call.parts)) return true;
  }
  return false;
}

}  // namespace

std::vector<Way> without_empty_parts(std::vector<Way> ways, const CallGeometry& call) {
  std::erase_if(ways, [&](const Way& way) {
    return !way.takes_empty_parts && leaves_a_part_empty(way, call);
  });
  return ways;
}

}  // namespace fsdp::internal
