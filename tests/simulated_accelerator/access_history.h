// The order checker: the last accesses of a block of memory, each with the item that made
// it. A new one that conflicts with an earlier one, and is not ordered after it by what
// its item waits for, is told with both names, in whatever order the two happened to run.
#pragma once

#include "tests/simulated_accelerator/clock.h"

#include <string>
#include <vector>

namespace fsdp::testing::simulated {

// Bytes of the device that an item reads or writes.
struct Access {
  const char* first = nullptr;
  const char* end = nullptr;
  bool writes = false;

  bool overlaps(const Access& other) const { return first < other.end && other.first < end; }
  bool covers(const Access& other) const { return first <= other.first && other.end <= end; }
};

// Who accesses.
struct ItemName {
  Position position;
  std::string operation;
  int stream = 0;  // as in Schedule

  std::string text() const { return operation + " (stream " + std::to_string(stream) + ")"; }
};

class AccessHistory {
 public:
  // Notes that `item`, which runs after all that `known` has, accesses the block. The
  // earlier conflicting accesses that it is not ordered after, as pairs of names.
  std::vector<std::string> note(const Access& access, const ItemName& item, const Clock& known);

  void forget() { past_.clear(); }

 private:
  struct Past {
    Access access;
    ItemName item;
  };

  std::vector<Past> past_;
};

}  // namespace fsdp::testing::simulated
