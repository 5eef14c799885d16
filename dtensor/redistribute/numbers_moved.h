// Whether all ranks gave the same numbers (numbers.h) to what one move brings together.
//
//   NumbersMoved moved(numbers, local.numel() > 0);
//   moved.send([&] { collectives.all_gather(...); });   // once per collective of the move
//   moved.check(mesh);
#pragma once

#include "device_mesh/collectives/word_beside.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/tensor/numbers.h"

#include <array>
#include <cstdint>
#include <vector>

namespace fsdp::internal {

class NumbersMoved {
 public:
  // A rank whose part has no elements has computed nothing, and may have left that out.
  NumbersMoved(const Numbers& numbers, bool has_elements);

  template <class Collective>
  void send(const Collective& collective) {
    const WordBeside beside(word_);
    collective();
    compare(beside.words());
  }
  // Throws ValueError where they differ, on all ranks that the move brings together.
  // Local.
  void check(const DeviceMesh& mesh) const;

 private:
  void compare(const std::vector<NoticeWords>& words);

  std::array<const char*, 3> taken_by_;
  uint64_t word_;
};

// Those of what this thread moves while one lives. Where there is none, what an operator
// moves has the numbers of the results that it makes.
class NumbersOfMove {
 public:
  explicit NumbersOfMove(const Numbers& numbers);
  ~NumbersOfMove();
  NumbersOfMove(const NumbersOfMove&) = delete;
  NumbersOfMove& operator=(const NumbersOfMove&) = delete;

  static const Numbers& current();

 private:
  Numbers numbers_;
  const Numbers* before_;
};

}  // namespace fsdp::internal
