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

}  // namespace

size_t Placement::hash() const {
  if (is_shard()) return 31 + 7 * static_cast<size_t>(shard_dim());
  if (is_partial()) return 2 + 7 * static_cast<size_t>(partial_op());
  return 1;
}

std::string to_string(const Placement& placement) {
  if (placement.is_shard()) return "Shard(" + std::to_string(placement.shard_dim()) + ")";
  if (placement.is_partial())
    return std::string("Partial(") + name_of(placement.partial_op()) + ")";
  return "Replicate()";
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  return out << to_string(placement);
}

}  // namespace fsdp
