// How often a group was gathered between two ends of a backward: once or twice, and more
// often where a unit is used in a loop (over time, over tokens) in which the turns of
// others come between. Pure integers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace fsdp::internal {

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
