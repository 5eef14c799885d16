// What belongs to one root and the units below it: the schedule, the counters, the
// groups, and whether the next backward is the last before the gradients are wanted
// (PyTorch's FSDPStateContext). When a root gets an ancestor, the ancestor's Root takes
// all over. Used by one thread at a time.
#pragma once

#include "fully_shard/schedule/schedule.h"
#include "fully_shard/transport/accounts.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace c10 {
struct Event;
}

namespace fsdp::internal {

// Writes through raw pointers bypass the gate, and are lost when their group is emptied.
// With DebugOptions::write_checks they are noticed there, by comparing this rank's part
// of the unsharded copy with its shard. Emptying happens where nothing may throw
// (destructors, an aborted backward), so the error waits here for the next place that
// may: a touch of any group of the root, reshard(), or the end of a backward.
class RawWrites {
 public:
  // `parameter` was emptied and had changed without a mark. The first one is kept.
  void note(const std::string& parameter) {
    if (!parameter_) parameter_ = parameter;
  }
  // Throws once for what was noted. Local: a rank notices writes to its own part only.
  void raise(int64_t global_rank);

 private:
  std::optional<std::string> parameter_;
};

class FSDPParamGroup;

class Root {
 public:
  using Groups = std::map<UnitId, FSDPParamGroup*>;

  Schedule& schedule() { return schedule_; }
  Accounts& accounts() { return accounts_; }
  RawWrites& raw_writes() { return raw_writes_; }

  // Of the units that have one.
  const Groups& groups() const { return groups_; }
  FSDPParamGroup* group_of(UnitId unit) const;  // null where it has none
  void add_group(UnitId unit, FSDPParamGroup& group) { groups_[unit] = &group; }
  void remove_group(UnitId unit) noexcept;

  bool is_last_backward() const { return is_last_backward_; }
  void set_is_last_backward(bool is_last) { is_last_backward_ = is_last; }

  // The group whose touches need nothing; null for none, or one of another tree.
  FSDPParamGroup* ready_group() const { return ready_group_; }
  void set_ready_group(FSDPParamGroup& group) { ready_group_ = &group; }

  // The next gather waits for `event`.
  void gather_after(std::shared_ptr<c10::Event> event) { gather_after_ = std::move(event); }
  // What the coming gather waits for; null for nothing.
  std::shared_ptr<c10::Event> take_gather_after() { return std::exchange(gather_after_, nullptr); }

  // True at the first call: a change of order is told once.
  bool tell_of_order_change() { return !std::exchange(told_of_order_change_, true); }

  void absorb(Root& other);

 private:
  Schedule schedule_;
  Accounts accounts_;
  RawWrites raw_writes_;
  Groups groups_;
  FSDPParamGroup* ready_group_ = nullptr;
  bool is_last_backward_ = true;
  bool told_of_order_change_ = false;
  std::shared_ptr<c10::Event> gather_after_;
};

}  // namespace fsdp::internal
