// The groups that one operator uses: collected and pinned first, then made readable, and
// unpinned when the operator is done.
//
//   TouchedGroups groups;
//   for (...) groups.add(*OnDemandStorage::behind(tensor));
//   groups.fill();      // collective where a group is not readable yet
//   run the operator
#pragma once

#include "on_demand/on_demand_storage.h"

#include <c10/util/SmallVector.h>

#include <cstdint>

namespace fsdp::internal {

// REQUIRES: the groups outlive this object.
class TouchedGroups {
 public:
  TouchedGroups() = default;
  TouchedGroups(const TouchedGroups&) = delete;
  TouchedGroups& operator=(const TouchedGroups&) = delete;
  ~TouchedGroups() {
    for (auto* group : groups_) group->unpin();
    if (evict_after_every_operator()) evict_if_outermost();
  }

  void add(const OnDemandStorage& storage) {
    auto* const group = &storage.group();
    if (!groups_.empty() && groups_.back() == group) return;
    group->pin();
    groups_.push_back(group);
  }
  void fill() {
    if (groups_.empty()) return;
    const Pass pass = current_pass();
    for (auto* group : groups_) {
      if (!group->settled(pass)) touch(*group);
    }
  }
  // What fill() begins with. For those who look at a group before that.
  void await_failed_backwards();

 private:
  // Out of line, so that the way of settled groups stays short in every kernel.
  void touch(Touchable& group);
  void await_failed_backward(Touchable& group);
  void await_end_unpinned(OpenBackward& backward);
  void evict_if_outermost();

  c10::SmallVector<Touchable*, 8> groups_;
};

// An operator whose body may meet the gate again is running while one lives.
class OuterOperator {
 public:
  OuterOperator() { ++depth(); }
  OuterOperator(const OuterOperator&) = delete;
  OuterOperator& operator=(const OuterOperator&) = delete;
  ~OuterOperator() { --depth(); }

  static bool is_running() { return depth() > 0; }

 private:
  static int64_t& depth();
};

}  // namespace fsdp::internal
