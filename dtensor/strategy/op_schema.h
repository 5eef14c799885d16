// An operator's call and how it may be sharded, as strategies see it (PyTorch's
// _op_schema.py): the schema of the call (OpSchema), a way to run it on parts along one
// mesh dimension (PlacementStrategy), and what an operator has of these (OpStrategy). No
// torch here.
#pragma once

#include "dtensor/layout/tensor_layout.h"
#include "dtensor/placement.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
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

// The schema of one call of an operator (PyTorch's OpSchema): the shapes of its tensors
// and its plain arguments. All ranks know it alike, and strategies depend on nothing
// else: never on values, never on a rank's own part.
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

// A placement strategy of an operator along one mesh dimension: placements of its tensor
// arguments, and those of its results when each rank runs it on its parts. (PyTorch's
// OpSpec, formerly PlacementStrategy, for one mesh dimension.)
//
//   // Rows of a product:
//   PlacementStrategy{.results = {Shard{0}}, .operands = {Shard{0}, Replicate{}}};
//
// An operator has several; those of its family are in dtensor/ops/. Each is exact
// whatever the sizes: parts may be uneven, and empty unless it says otherwise. So each
// mesh dimension may have a strategy of its own: the parts that one leaves are operands
// of the same operator to the next.
struct PlacementStrategy {
  std::vector<Placement> results;
  std::vector<Placement> operands;  // one per tensor argument; Replicate for absent ones
  bool takes_empty_parts = true;
  bool asks_other_ranks = false;  // what each does on its part (OpEntry::local_kernel)

  bool operator==(const PlacementStrategy&) const = default;
};

// Everything replicated, which fits every operator.
PlacementStrategy replicated_strategy(size_t results, size_t operands);

std::string to_string(const PlacementStrategy& strategy);  // "Shard(0), Replicate() -> Shard(0)"

// The placement strategies of a call that cut something or add up terms. Running
// replicated is always possible and not among them.
using StrategyFunction = std::function<std::vector<PlacementStrategy>(const OpSchema& call)>;

using TensorPlacements = std::vector<Placement>;  // one per mesh dimension

// The placements to which operands are redistributed, and those of the results.
struct Propagation {
  std::vector<TensorPlacements> operands;  // where they go
  std::vector<TensorPlacements> results;

  bool operator==(const Propagation&) const = default;
};

// How a call lies before it runs: the mesh, and where its operands are.
struct CallPlacements {
  std::vector<int64_t> mesh_shape;
  std::vector<TensorPlacements> operands;
  // The operand that is written in place: its first result lies as it does, and it stays.
  // Where no strategy allows that, it is told to become replicated.
  std::optional<size_t> written = {};
};

// How a whole result lies in memory.
struct ResultGeometry {
  std::vector<int64_t> shape;
  std::vector<int64_t> stride;

  bool operator==(const ResultGeometry&) const = default;
};
ResultGeometry contiguous(std::vector<int64_t> shape);
// Without gaps, the dimensions in the order in memory that `stride` gives them.
ResultGeometry laid_as(std::vector<int64_t> shape, const std::vector<int64_t>& stride);
// Contiguous but for dimensions `a` and `b`, which change places in memory.
ResultGeometry transposed(std::vector<int64_t> shape, size_t a, size_t b);

// One per result; any for those that the operator leaves undefined. The shapes must be
// right, but for what some devices' kernels leave out (result_over); the strides are
// best so: a result that lies otherwise in memory is copied.
using ResultsOf = std::function<std::vector<ResultGeometry>(const OpSchema& call)>;

// How a call lies once its operands are where they go, and where a rank is.
struct PlacedCall {
  std::vector<TensorLayout> operands;  // any for absent ones
  std::vector<TensorLayout> results;
  std::vector<int64_t> coordinate;
};

// A plain argument, by place in the schema, as it is for a rank's parts: sizes, mostly.
struct PartArgument {
  size_t place;
  PlainArgument value;
};
using PartArgumentsOf =
    std::function<std::vector<PartArgument>(const OpSchema& call, const PlacedCall& placed)>;

// What each mesh dimension does, where that depends on what the others do.
using PropagationOf =
    std::function<Propagation(const OpSchema& call, const CallPlacements& placements)>;

// The sharding strategy of an operator: its placement strategies for a call, the geometry
// of its results, and the sizes that it is called with on a rank's parts.
struct OpStrategy {
  bool any() const { return strategies != nullptr || propagation != nullptr; }

  StrategyFunction strategies = nullptr;
  PropagationOf propagation = nullptr;       // instead of `strategies`
  ResultsOf results = nullptr;               // null: LibTorch's meta kernel knows
  PartArgumentsOf part_arguments = nullptr;  // null: parts take the arguments as they are
  // Places of real numbers that these depend on. Others are not looked at: most differ
  // from call to call.
  std::vector<size_t> reals = {};
};
// `known` with the placement strategies of `more` after its own.
OpStrategy with_more_strategies(const OpStrategy& known, const StrategyFunction& more);

}  // namespace fsdp::internal
