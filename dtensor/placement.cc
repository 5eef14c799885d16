#include "dtensor/placement.h"

namespace fsdp {
namespace {

const char* name_of(Partial::Op op) {
  switch (op) {
    case Partial::Op::kSum:
      return "sum";
    case Partial::Op::kAvg:
      return "avg";
    case Partial::Op::kMin:
      return "min";
    case Partial::Op::kMax:
      return "max";
    case Partial::Op::kProduct:
      return "product";
  }
  return "unknown";
}

std::string text_of_ragged(const Shard& cut) {
  const std::string dim = std::to_string(cut.dim);
  if (cut.local_units == LocalUnits::of_owner(Owned::kPlanned)) return "Owned()";
  if (const auto owner = cut.local_units.owner())
    return "Owned(" + std::to_string(*owner) + (cut.dim == 0 ? "" : ", dim=" + dim) + ")";
  return "RaggedShard(" + dim + ", local_units=" + cut.local_units.to_string() + ")";
}

}  // namespace

size_t Placement::hash() const {
  if (is_shard()) {
    const auto& [dim, outer, unit, local_units] = shard();
    return 31 + 7 * static_cast<size_t>(dim + 1009 * (outer - 1) + 9176423 * (unit - 1)) +
           1000003 * local_units.hash();
  }
  if (is_partial()) return 2 + 7 * static_cast<size_t>(partial_op());
  return 1;
}

Placement Placement::along(int64_t dim) const {
  Shard cut = shard();
  cut.dim = dim;
  return cut;
}

std::string to_string(const Placement& placement) {
  if (placement.is_ragged()) return text_of_ragged(placement.shard());
  if (placement.is_shard()) {
    const auto& [dim, outer, unit, local_units] = placement.shard();
    return "Shard(" + std::to_string(dim) +
           (outer > 1 ? ", outer=" + std::to_string(outer) : std::string()) +
           (unit > 1 ? ", unit=" + std::to_string(unit) : std::string()) + ")";
  }
  if (placement.is_partial())
    return std::string("Partial(") + name_of(placement.partial_op()) + ")";
  return "Replicate()";
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  return out << to_string(placement);
}

}  // namespace fsdp
