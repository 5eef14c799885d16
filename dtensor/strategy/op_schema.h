// The schema of one call of an operator (PyTorch's OpSchema): the shapes of its tensors
// and its plain arguments. All ranks know it alike, and strategies depend on nothing
// else: never on values, never on a rank's own part. No torch here.
#pragma once

#include "dtensor/placement.h"

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

namespace fsdp::internal {

// One tensor argument.
struct Operand {
  std::vector<int64_t> shape = {};  // of the whole, as stride
  std::vector<int64_t> stride = {};
  int64_t element_size = 0;  // in bytes; 0 for an optional tensor that is absent

  bool is_present() const { return element_size > 0; }
  int64_t ndim() const { return static_cast<int64_t>(shape.size()); }
  int64_t size(int64_t dim) const;  // a negative `dim` counts from the end
  int64_t bytes() const;
};

// An argument that is no tensor: None and what cannot matter (real numbers, generators,
// strings), a whole number, truth value or dtype, or a list of whole numbers.
using PlainArgument = std::variant<std::monostate, int64_t, std::vector<int64_t>>;

struct OpSchema {
  std::vector<Operand> operands;     // the tensor arguments in order, absent ones too
  std::vector<PlainArgument> plain;  // by place in the schema; none for tensors
  // How many parts the mesh dimensions make together that strategies are asked for: what
  // divides by this divides by each, and has no empty part on any.
  int64_t parts = 1;
  // The placements that operands arrive with along the mesh dimension that strategies are
  // asked for, and how many ranks it has: for strategies that depend on the very cut.
  std::vector<Placement> arriving = {};
  int64_t ranks = 1;

  int64_t number(size_t place) const { return std::get<int64_t>(plain[place]); }
  const std::vector<int64_t>& numbers(size_t place) const {
    return std::get<std::vector<int64_t>>(plain[place]);
  }
};

// `dim` counted from the front. Throws std::out_of_range unless -ndim <= dim < ndim,
// where a number counts as one dimension.
int64_t wrapped_dim(int64_t dim, int64_t ndim);

}  // namespace fsdp::internal
