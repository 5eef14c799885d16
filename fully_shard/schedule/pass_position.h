// The position of a root in the running pass: the kind of the pass, and the units that
// were entered last and first. There is none before the first touch.
#pragma once

#include "fully_shard/schedule/pass_kind.h"
#include "fully_shard/schedule/unit_id.h"

#include <optional>
#include <utility>

namespace fsdp::internal {

struct PassPosition {
  std::optional<PassKind> kind = {};
  std::optional<UnitId> previous = {}, current = {};
  std::optional<UnitId> first = {};  // entered first since the kind changed

  void enter(UnitId unit) {
    if (!current) first = unit;
    previous = std::exchange(current, unit);
  }
  // The kind stays.
  void leave_units() { previous = current = first = std::nullopt; }
  void remove(UnitId unit) {
    for (auto* entered : {&previous, &current, &first}) {
      if (*entered == unit) entered->reset();
    }
  }
};

}  // namespace fsdp::internal
