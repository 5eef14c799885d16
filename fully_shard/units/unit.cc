#include "fully_shard/units/unit.h"

namespace fsdp::internal {

bool Unit::is_ancestor_of(const Unit& other) const {
  for (auto ancestor = other.parent.lock(); ancestor; ancestor = ancestor->parent.lock()) {
    if (ancestor.get() == this) return true;
  }
  return false;
}

}  // namespace fsdp::internal
