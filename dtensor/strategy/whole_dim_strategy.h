// The strategy of operators that work along some dimensions: they fit where another one
// is cut. softmax, cumsum and sort keep those dimensions, max(dim) loses them. No torch
// here.
#pragma once

#include "dtensor/strategy/op_schema.h"

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

// One strategy per dimension that is not among them: all operands lie alike, and so do
// all results, once the dimensions before are gone.
std::vector<PlacementStrategy> along_strategy(const OpSchema& call, const Along& along,
                                              size_t results);

// What a call works along, as its schema has it.
using AlongOf = Along (*)(const OpSchema& call);

// The dimension or dimensions, of `ndim`, that an argument gives; all where it gives
// none.
std::vector<int64_t> given_dims(const PlainArgument& argument, int64_t ndim);
// Of operand 0.
std::vector<int64_t> given_dims(const OpSchema& call, size_t place);

// Those, which stay: cumsum(self, dim).
template <size_t place>
Along kept(const OpSchema& call) {
  return {.dims = given_dims(call, place)};
}
// Those, and whether they become one or go is the next argument: kthvalue(self, k, dim,
// keepdim).
template <size_t place>
Along reduced(const OpSchema& call) {
  const bool keepdim = call.number(place + 1) != 0;
  return {.dims = given_dims(call, place),
          .then = keepdim ? Along::Then::kBecomeOne : Along::Then::kGo};
}
// All dimensions, which go.
Along all_reduced(const OpSchema& call);

// For an operator that works along `of` and has `results` results, all placed alike.
OpStrategy along(AlongOf of, size_t results = 1);

// The shape of operand 0 after that; in memory like it where the dimensions stay, else
// contiguous.
ResultGeometry along_result(const OpSchema& call, const Along& along);

}  // namespace fsdp::internal
