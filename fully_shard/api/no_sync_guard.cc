#include "fully_shard/no_sync_guard.h"

#include "fully_shard/units/unit.h"

#include <utility>

namespace fsdp {

NoSyncGuard::NoSyncGuard(FSDPModule module) {
  internal::for_each_unit_below(*internal::unit_of(module), [this](internal::Unit& unit) {
    before_.push_back({unit.weak_from_this(), unit.policy.synchronize_gradients});
  });
  for (const auto& [unit, synchronized] : before_)
    unit.lock()->policy.synchronize_gradients = false;
}

NoSyncGuard::~NoSyncGuard() {
  for (const auto& [weak, synchronized] : before_) {
    if (const auto unit = weak.lock()) unit->policy.synchronize_gradients = synchronized;
  }
}

}  // namespace fsdp
