// What belongs to one root and the units below it: the schedule, the counters, and
// whether the next backward is the last before the gradients are wanted. When a root gets
// an ancestor, the ancestor's Root takes all over. Used by one thread at a time.
#pragma once

#include "fully_shard/schedule/schedule.h"
#include "fully_shard/transport/accounts.h"
#include "fully_shard/units/raw_writes.h"

#include <map>
#include <memory>
#include <utility>

namespace c10 {
struct Event;
}

namespace fsdp::internal {

class FSDPParamGroup;

class Root {
 public:
  Schedule schedule;
  Accounts accounts;
  bool is_last_backward = true;
  RawWrites raw_writes;
  bool told_of_order_change = false;
  std::shared_ptr<c10::Event> after_optimizer;  // the next gather waits for it; null: nothing
  FSDPParamGroup* settled = nullptr;  // the one whose touches need nothing, if it is in this tree
  std::map<UnitId, FSDPParamGroup*> groups;  // of the units that have one; they take themselves off

  void absorb(Root& other) {
    schedule.absorb(std::move(other.schedule));
    accounts.absorb(other.accounts);
    groups.merge(other.groups);
    if (other.after_optimizer) after_optimizer = std::move(other.after_optimizer);
  }
};

}  // namespace fsdp::internal
