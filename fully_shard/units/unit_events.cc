#include "fully_shard/units/unit_events.h"

#include <utility>

namespace fsdp::internal {
namespace {

thread_local UnitObserver* observer_of_thread = nullptr;

}  // namespace

UnitObserver* set_unit_observer(UnitObserver* observer) {
  return std::exchange(observer_of_thread, observer);
}

UnitObserver* unit_observer() { return observer_of_thread; }

}  // namespace fsdp::internal
