// Operators that work along some of their dimensions fit where another one is cut.
// softmax, cumsum and sort keep them, max(dim) and its like lose them. No torch here.
#pragma once

#include "dtensor/strategy/operator_ways.h"

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

// What a call works along, as its schema has it.
using AlongOf = Along (*)(const CallGeometry& call);

// The dimension or dimensions, of `ndim`, that an argument gives; all where it gives
// none.
std::vector<int64_t> given_dims(const PlainArgument& argument, int64_t ndim);
// Of operand 0.
std::vector<int64_t> given_dims(const CallGeometry& call, size_t place);

// Those, which stay: cumsum(self, dim).
template <size_t place>
Along kept(const CallGeometry& call) {
  return {.dims = given_dims(call, place)};
}
// Those, and whether they become one or go is the next argument: kthvalue(self, k, dim,
// keepdim).
template <size_t place>
Along reduced(const CallGeometry& call) {
  const bool keepdim = call.number(place + 1) != 0;
  return {.dims = given_dims(call, place),
          .then = keepdim ? Along::Then::kBecomeOne : Along::Then::kGo};
}
// All dimensions, which go.
Along all_reduced(const CallGeometry& call);

// Those of an operator that works along `of`, with as many results, which all lie alike.
OperatorWays along(AlongOf of, size_t results = 1);

// The shape of operand 0 after that; in memory like it where the dimensions stay, else
// contiguous.
ResultGeometry along_result(const CallGeometry& call, const Along& along);

}  // namespace fsdp::internal
