#include "fully_shard/params/sharded_state.h"

#include <stdexcept>
#include <string>

namespace fsdp::internal {

const char* to_string(ShardedState state) {
  switch (state) {
    case ShardedState::kNeverSharded:
      return "never sharded";
    case ShardedState::kSharded:
      return "sharded";
    case ShardedState::kGathering:
      return "gathering";
    case ShardedState::kUnsharded:
      return "unsharded";
  }
  return "unknown";
}

void ShardedStateMachine::move(ShardedState from, ShardedState to) {
  if (state_ != from) {
    throw std::logic_error(std::string("a group that is ") + to_string(state_) +
                           " can not become " + to_string(to));
  }
  state_ = to;
}

void ShardedStateMachine::emptied() {
  if (is_held()) throw std::logic_error("a held group can not be emptied");
  move(ShardedState::kUnsharded, ShardedState::kSharded);
}

void ShardedStateMachine::hold() {
  if (!is_unsharded() && !is_never_sharded()) {
    throw std::logic_error(std::string("a group that is ") + to_string(state_) +
                           " can not be held");
  }
  ++holds_;
}

void ShardedStateMachine::release() {
  if (!is_held()) throw std::logic_error("a group that is not held can not be released");
  --holds_;
}

}  // namespace fsdp::internal
