// The sharded state of a group (PyTorch's ShardedState), and how often it was gathered.
// Pure.
//
//   state                 event                next
//   sharded               gather_issued()      gathering
//   sharded post-forward  gather_issued()      gathering
//   gathering             filled()             unsharded
//   gathering             gather_dropped()     what it was before    (discarded, or failed)
//   unsharded             emptied(leaves)      sharded               REQUIRES no hold
//   unsharded             emptied(kPart)       sharded post-forward  REQUIRES no hold
//   sharded post-forward  part_dropped()       sharded
//   gathering             part_dropped()       gathering, and sharded once it is dropped
//   never sharded         -                    (one rank: members use the shards' memory)
//
// Sharded post-forward (PyTorch's SHARDED_POST_FORWARD): ReshardAfterForward::to_world(n)
// left each of n neighbouring ranks an n-th of the full parameters, which the next gather
// puts together again. part_dropped() does nothing in the other states.
//
// A hold keeps an unsharded or never sharded group as it is, for raw access; holds nest.
// Anything else throws std::logic_error.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace fsdp::internal {

enum class ShardedState : uint8_t {
  kNeverSharded,
  kSharded,
  kShardedPostForward,
  kGathering,
  kUnsharded
};

// What is left of an unsharded group when it is emptied: its shards; with to_world(n) a
// part of the full parameters; or, a test mode, a copy whose bytes read 0xff, even
// through pointers that were kept.
enum class Leaves : uint8_t { kShards, kPart, kPoison };

inline const char* to_string(ShardedState state) {
  switch (state) {
    case ShardedState::kNeverSharded:
      return "never sharded";
    case ShardedState::kSharded:
      return "sharded";
    case ShardedState::kShardedPostForward:
      return "sharded post-forward";
    case ShardedState::kGathering:
      return "gathering";
    case ShardedState::kUnsharded:
      return "unsharded";
  }
  return "unknown";
}

class ShardedStateMachine {
 public:
  explicit ShardedStateMachine(ShardedState start = ShardedState::kSharded) : state_(start) {}

  void gather_issued() {
    check(is_sharded(), "can not gather");
    before_ = std::exchange(state_, ShardedState::kGathering);
  }
  void filled() {
    check(is_gathering(), "can not be filled");
    state_ = ShardedState::kUnsharded;
  }
  void gather_dropped() {
    check(is_gathering(), "has no gather to drop");
    state_ = before_;
  }
  void emptied(Leaves leaves) {
    check(is_unsharded() && !is_held(),
          is_held() ? "and held can not be emptied" : "can not be emptied");
    state_ = leaves == Leaves::kPart ? ShardedState::kShardedPostForward : ShardedState::kSharded;
  }
  void part_dropped() {
    if (state_ == ShardedState::kShardedPostForward) state_ = ShardedState::kSharded;
    before_ = ShardedState::kSharded;
  }
  void hold() {
    check(is_unsharded() || is_never_sharded(), "can not be held");
    ++holds_;
  }
  void release() {
    check(is_held(), "and not held can not be released");
    --holds_;
  }

  ShardedState state() const { return state_; }
  // After a forward or not.
  bool is_sharded() const { return state_ == ShardedState::kSharded || is_sharded_post_forward(); }
  bool is_sharded_post_forward() const { return state_ == ShardedState::kShardedPostForward; }
  bool is_gathering() const { return state_ == ShardedState::kGathering; }
  bool is_unsharded() const { return state_ == ShardedState::kUnsharded; }
  bool is_never_sharded() const { return state_ == ShardedState::kNeverSharded; }
  bool is_held() const { return holds_ > 0; }

 private:
  void check(bool is_legal, const char* what) const {
    if (!is_legal)
      throw std::logic_error(std::string("a group that is ") + to_string(state_) + " " + what);
  }

  ShardedState state_;
  ShardedState before_ = ShardedState::kSharded;  // state_, before the gather was issued
  int64_t holds_ = 0;
};

// How often a group was gathered between two ends of a backward: once or twice, and more
// often where a unit is used in a loop (over time, over tokens) in which the turns of
// others come between.
class GatherCount {
 public:
  void gathered() { ++running_; }
  void backward_ended() { last_ = std::exchange(running_, 0); }
  // In the round that goes on, or the one before.
  int64_t most() const { return std::max(running_, last_); }
  // More than forward, recomputation and backward of a few graphs account for.
  bool is_often() const { return most() > 8; }

 private:
  int64_t running_ = 0, last_ = 0;
};

}  // namespace fsdp::internal
