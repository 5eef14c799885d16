// ShardedStateMachine against its table: every sequence of up to six events from every
// start.
#include "fully_shard/params/sharded_state.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <vector>

namespace fsdp::internal {
namespace {

enum class Event { kIssued, kFilled, kDropped, kEmptied, kHold, kRelease };
constexpr int kEvents = 6;

// The table of the header, by itself.
struct ModelOfState {
  ShardedState state;
  int holds = 0;

  std::optional<ModelOfState> after(Event event) const {
    const bool there = state == ShardedState::kUnsharded || state == ShardedState::kNeverSharded;
    switch (event) {
      case Event::kIssued:
        return state == ShardedState::kSharded ? step(ShardedState::kGathering, 0) : std::nullopt;
      case Event::kFilled:
        return state == ShardedState::kGathering ? step(ShardedState::kUnsharded, 0) : std::nullopt;
      case Event::kDropped:
        return state == ShardedState::kGathering ? step(ShardedState::kSharded, 0) : std::nullopt;
      case Event::kEmptied:
        return state == ShardedState::kUnsharded && holds == 0 ? step(ShardedState::kSharded, 0)
                                                               : std::nullopt;
      case Event::kHold:
        return there ? step(state, 1) : std::nullopt;
      case Event::kRelease:
        return holds > 0 ? step(state, -1) : std::nullopt;
    }
    return std::nullopt;
  }
  std::optional<ModelOfState> step(ShardedState next, int change) const {
    return ModelOfState{next, holds + change};
  }
};

void apply(ShardedStateMachine& sharded_state, Event event) {
  switch (event) {
    case Event::kIssued:
      return sharded_state.gather_issued();
    case Event::kFilled:
      return sharded_state.filled();
    case Event::kDropped:
      return sharded_state.gather_dropped();
    case Event::kEmptied:
      return sharded_state.emptied();
    case Event::kHold:
      return sharded_state.hold();
    case Event::kRelease:
      return sharded_state.release();
  }
}

int sequences = 0;

void check_all(const ShardedStateMachine& sharded_state, const ModelOfState& model, int depth) {
  EXPECT_EQ(sharded_state.state(), model.state);
  EXPECT_EQ(sharded_state.is_held(), model.holds > 0);
  ++sequences;
  if (depth == 0) return;
  for (int event = 0; event < kEvents; ++event) {
    auto next = sharded_state;
    const auto expected = model.after(static_cast<Event>(event));
    if (!expected) {
      EXPECT_THROW(apply(next, static_cast<Event>(event)), std::logic_error);
      EXPECT_EQ(next.state(), model.state) << "a refused event changes nothing";
      EXPECT_EQ(next.is_held(), model.holds > 0);
      continue;
    }
    apply(next, static_cast<Event>(event));
    check_all(next, *expected, depth - 1);
  }
}

TEST(ShardedStateMachine, FollowsItsTableInEverySequenceOfSixEvents) {
  sequences = 0;
  for (const auto start : {ShardedState::kSharded, ShardedState::kNeverSharded}) {
    check_all(ShardedStateMachine(start), ModelOfState{start}, 6);
  }
  EXPECT_EQ(sequences, 79) << "legal ones, and the start";
}

}  // namespace
}  // namespace fsdp::internal
