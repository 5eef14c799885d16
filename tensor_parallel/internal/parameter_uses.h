// What a style means for one parameter: how it is cut, and where the input and the result
// of the operator that uses it lie. No torch here.
#pragma once

#include "dtensor/placement.h"
#include "tensor_parallel/parallel_plan.h"

#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

// Nothing where the rules decide.
struct Use {
  std::optional<Placement> input;
  std::optional<Placement> output;
  bool operator==(const Use&) const = default;
};

// By the operator that reads the parameter: a tied one may have several.
struct ParameterUses {
  std::optional<Use> product;  // input times weight.t()
  std::optional<Use> lookup;   // rows of a table
  std::optional<Use> norm;
  bool is_own = false;  // beside plain tensors this rank's part counts, not the whole
  bool operator==(const ParameterUses&) const = default;
};

// What the ranks of the mesh compute their gradients from.
enum class Batches { kOne, kOnePerRank };

struct ParallelParameter {
  Placement placement;
  ParameterUses uses;
  Batches batches = Batches::kOne;
};

enum class ModuleKind {
  kProduct,  // Linear, and modules of one's own with a 2-D `weight`
  kEmbedding,
  kAttention,  // MultiheadAttention, whose output projection is a module of its own
  kNorm,       // LayerNorm, and modules of one's own whose parameters have one dimension
  kOther,
};

struct ParameterRole {
  ModuleKind kind;
  std::string leaf;            // "weight"
  std::vector<int64_t> shape;  // of the parameter
  std::string module_type;     // for errors
  int64_t head_width = 0;      // of kAttention
};

// Throws std::invalid_argument, which says why, for a style that does not know such a
// parameter, and for units and sections that do not divide the dimension.
ParallelParameter parallel_parameter(const ParallelStyle& style, const ParameterRole& role);

// What a style of an attention module means for its output projection.
ParallelStyle style_of_output_projection(const ColwiseParallel& attention, int64_t head_width);

// What holds of a parameter that has both. Throws std::invalid_argument where they say
// different things.
ParallelParameter tied(const ParallelParameter& one, const ParallelParameter& other);

// `placement` of a tensor of `ndim` dimensions, with its dimension counted from the
// start.
Placement counted_from_start(const Placement& placement, int64_t ndim);

}  // namespace fsdp::internal
