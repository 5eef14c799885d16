// Vector clocks: what is known to be finished, as a number of items for each queue.
//
//   Clock known;
//   known.add({queue, 3});
//   known.contains({queue, 2});  // true: items of one queue finish in their order
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::testing::simulated {

// An item of a queue. The first one has the number 1; the number 0 is always finished.
struct Position {
  size_t queue = 0;
  uint64_t number = 0;
};

class Clock {
 public:
  bool contains(Position position) const {
    if (position.number == 0) return true;
    return position.queue < finished_.size() && finished_[position.queue] >= position.number;
  }

  void add(Position position) {
    if (finished_.size() <= position.queue) finished_.resize(position.queue + 1);
    finished_[position.queue] = std::max(finished_[position.queue], position.number);
  }

  void join(const Clock& other) {
    for (size_t queue = 0; queue < other.finished_.size(); ++queue) {
      add({queue, other.finished_[queue]});
    }
  }

 private:
  std::vector<uint64_t> finished_;  // by queue
};

}  // namespace fsdp::testing::simulated
