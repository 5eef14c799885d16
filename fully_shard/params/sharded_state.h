// The sharded state of a group (PyTorch's ShardedState): a state machine that checks
// every transition. Pure.
//
//   state          event               next
//   sharded        gather_issued()     gathering
//   gathering      filled()            unsharded
//   gathering      gather_dropped()    sharded    (discarded, or failed)
//   unsharded      emptied()           sharded    REQUIRES no hold
//   never sharded  -                              (one rank: the members use the shards' memory)
//
// A group of which to_world(n) keeps a part between forward and backward (PyTorch's
// SHARDED_POST_FORWARD) counts as sharded (post_forward_shards.h).
//
// A hold keeps an unsharded or never sharded group as it is, for raw access; holds nest.
// Anything else throws std::logic_error.
#pragma once

#include <cstdint>

namespace fsdp::internal {

enum class ShardedState : uint8_t { kNeverSharded, kSharded, kGathering, kUnsharded };

const char* to_string(ShardedState state);

class ShardedStateMachine {
 public:
  explicit ShardedStateMachine(ShardedState start = ShardedState::kSharded) : state_(start) {}

  void gather_issued() { move(ShardedState::kSharded, ShardedState::kGathering); }
  void filled() { move(ShardedState::kGathering, ShardedState::kUnsharded); }
  void gather_dropped() { move(ShardedState::kGathering, ShardedState::kSharded); }
  void emptied();
  void hold();
  void release();

  ShardedState state() const { return state_; }
  bool is_sharded() const { return state_ == ShardedState::kSharded; }
  bool is_gathering() const { return state_ == ShardedState::kGathering; }
  bool is_unsharded() const { return state_ == ShardedState::kUnsharded; }
  bool is_never_sharded() const { return state_ == ShardedState::kNeverSharded; }
  bool is_held() const { return holds_ > 0; }

 private:
  void move(ShardedState from, ShardedState to);

  ShardedState state_;
  int64_t holds_ = 0;
};

}  // namespace fsdp::internal
