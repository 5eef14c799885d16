// What happens to units, for tests that compare it with a model of their own: one
// observer for a thread and the backwards that it starts, none by default.
//
//   struct Log : UnitObserver { void touched(const Unit& unit, Pass pass) override { ... } };
//   Log log;
//   const ObserveUnits observe(log);
//
// Events come on the thread that runs the operator or call, on CPU that of the rank, each
// after what it tells of was done. In a world of one, where nothing is gathered, touches
// and writes are not told.
#pragma once

#include "device_mesh/internal/inherited.h"
#include "on_demand/pass.h"

namespace fsdp::internal {

class Unit;

class UnitObserver {
 public:
  virtual ~UnitObserver() = default;

  // An operator is about to use the unit, which is unsharded. Of equal touches with no
  // event between them only the first need be told.
  virtual void touched(const Unit& unit, Pass pass) = 0;
  // A gradient arrived in a backward, whether or not that touched the unit.
  virtual void gradient_arrived(const Unit& unit) = 0;

  // unshard_async, also as the first half of unshard: the unit is unsharded, or its
  // gather was issued.
  virtual void unshard_issued(const Unit& unit) = 0;
  // unshard, or the wait after unshard_async: the unit is unsharded.
  virtual void unsharded_explicitly(const Unit& unit) = 0;
  virtual void resharded_explicitly(const Unit& unit) = 0;

  // A write to a registry entry, which leaves an unsharded copy stale; to a member, which
  // leaves it dirty.
  virtual void entry_written(const Unit& unit) = 0;
  virtual void member_written(const Unit& unit) = 0;

  // Of an outermost graph task: all is reduced and emptied; or it threw, and what it left
  // is gone.
  virtual void backward_ended() = 0;
  virtual void backward_aborted() = 0;
};

// Until the end of the scope `observer` is the calling thread's, which it outlives.
class ObserveUnits {
 public:
  explicit ObserveUnits(UnitObserver& observer) : scope_(Inherited::kUnitObserver, &observer) {}

 private:
  InheritedScope scope_;
};

// Tells the running thread's observer, if it has one:
//   tell_unit_observer(&UnitObserver::touched, unit, pass);
inline UnitObserver* unit_observer() {
  return static_cast<UnitObserver*>(inherited(Inherited::kUnitObserver));
}
template <class... Parameters, class... Arguments>
void tell_unit_observer(void (UnitObserver::*event)(Parameters...), Arguments&&... arguments) {
  if (auto* observer = unit_observer()) (observer->*event)(arguments...);
}

}  // namespace fsdp::internal
