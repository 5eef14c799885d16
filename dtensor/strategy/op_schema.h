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

// By LibTorch's number of it.
struct Dtype {
  int64_t number = 0;
  int64_t element_size = 0;  // in bytes

  bool operator==(const Dtype&) const = default;
};

// One tensor argument.
struct Operand {
  std::vector<int64_t> shape = {};  // of the whole, as stride
  std::vector<int64_t> stride = {};
  Dtype dtype = {};  // its element size is 0 for an optional tensor that is absent

  bool is_present() const { return dtype.element_size > 0; }
  int64_t ndim() const { return static_cast<int64_t>(shape.size()); }
  int64_t size(int64_t dim) const;  // a negative `dim` counts from the end
  int64_t bytes() const;
};

// An argument that is no tensor: a whole number or truth value, a list of such, a dtype,
// or a real number that the operator's strategy asks for (OpStrategy::reals). All else is
// none: None, other real numbers, generators, strings.
using PlainArgument = std::variant<std::monostate, int64_t, std::vector<int64_t>, double, Dtype>;

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
  // Null where it is None.
  const double* real(size_t place) const { return std::get_if<double>(&plain[place]); }
  const Dtype* dtype(size_t place) const { return std::get_if<Dtype>(&plain[place]); }
};

// `dim` counted from the front. Throws std::out_of_range unless -ndim <= dim < ndim,
// where a number counts as one dimension.
int64_t wrapped_dim(int64_t dim, int64_t ndim);

}  // namespace fsdp::internal
