#include "fully_shard/units/unit_events.h"

namespace fsdp::internal {

UnitObserver* unit_observer() {
  return static_cast<UnitObserver*>(inherited(Inherited::kUnitObserver));
}

}  // namespace fsdp::internal
