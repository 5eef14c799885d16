// ShardedStateMachine against its table: every sequence of up to six events from every
// start.
#include "fully_shard/params/sharded_state.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <vector>

namespace fsdp::internal {
namespace {

enum class Event { kIssued, kFilled, kDropped, kEmptied, kPartKept, kPartDropped, kHold, kRelease };
constexpr int kEvents = 8;

// The table of the header, by itself.
struct ModelOfState {
  ShardedState state;
  ShardedState before = ShardedState::kSharded;  // the gather
  int holds = 0;

  std::optional<ModelOfState> after(Event event) const {
    const bool there = state == ShardedState::kUnsharded || state == ShardedState::kNeverSharded;
    const bool can_be_emptied = state == ShardedState::kUnsharded && holds == 0;
    const bool is_sharded =
        state == ShardedState::kSharded || state == ShardedState::kShardedPostForward;
    const bool gathers = state == ShardedState::kGathering;
    switch (event) {
      case Event::kIssued:
        return only_if(is_sharded, {ShardedState::kGathering, state});
      case Event::kFilled:
        return only_if(gathers, {ShardedState::kUnsharded});
      case Event::kDropped:
        return only_if(gathers, {before});
      case Event::kEmptied:
        return only_if(can_be_emptied, {ShardedState::kSharded});
      case Event::kPartKept:
        return only_if(can_be_emptied, {ShardedState::kShardedPostForward});
      case Event::kPartDropped:
        return ModelOfState{
            state == ShardedState::kShardedPostForward ? ShardedState::kSharded : state,
            ShardedState::kSharded, holds};
      case Event::kHold:
        return only_if(there, {state, before, holds + 1});
      case Event::kRelease:
        return only_if(holds > 0, {state, before, holds - 1});
    }
    return std::nullopt;
  }
  static std::optional<ModelOfState> only_if(bool is_legal, ModelOfState next) {
    return is_legal ? std::optional(next) : std::nullopt;
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
      return sharded_state.emptied(Leaves::kShards);
    case Event::kPartKept:
      return sharded_state.emptied(Leaves::kPart);
    case Event::kPartDropped:
      return sharded_state.part_dropped();
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
  EXPECT_EQ(sequences, 896) << "legal ones, and the start";
}

}  // namespace
}  // namespace fsdp::internal
