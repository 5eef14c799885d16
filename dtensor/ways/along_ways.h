// Operators that work along some of their dimensions fit where another one is cut.
// softmax, cumsum and sort keep them, max(dim) and its like lose them. No torch here.
#pragma once

#include "dtensor/ways/operator_ways.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Which dimensions of operand 0 a call works along, and what becomes of them.
struct Along {
  enum class Then { kStay, kBecomeOne, kGo };

  std::vector<int64_t> dims;  // not negative
  Then then = Then::kStay;
};

// One way per dimension that is not among them: all operands lie alike, and so do all
// results, once the dimensions before are gone.
std::vector<Way> along_ways(const CallGeometry& call, const Along& along, size_t results);

// The shape of operand 0 after that; in memory like it where the dimensions stay, else
// contiguous.
ResultGeometry along_result(const CallGeometry& call, const Along& along);

}  // namespace fsdp::internal
