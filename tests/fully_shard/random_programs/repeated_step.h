// A step that repeats is foreseen: nothing is gathered in vain, and every gather of its
// backward is issued when the model's BackwardPrefetch says.
#pragma once

#include "tests/fully_shard/random_programs/residency_oracle.h"
#include "tests/fully_shard/random_programs/unit_turn.h"

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fsdp::testing {

// How the gathers of a backward are issued ahead.
struct PrefetchRule {
  bool after_gradients = false;
  std::set<int> never = {};  // units that are not gathered ahead
};
// What was not issued when `rule` says, in a step whose turns are those of the one before
// and have one successor each.
std::optional<std::string> wrong_prefetch(const std::vector<UnitTurn>& turns,
                                          const PrefetchRule& rule);

// Runs `step` three times. What went wrong in the last, if it repeated the one before:
// the first two may still follow a forward that was abandoned, which no rank can tell
// from the start of this one. REQUIRES: no unit has a list of what to prefetch, and all
// have one root.
std::optional<std::string> repeat_step(const std::function<void()>& step, ResidencyOracle& oracle,
                                       const PrefetchRule& rule);

}  // namespace fsdp::testing
