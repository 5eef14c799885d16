// What a plain tensor counts as where an operator has DTensors too (PyTorch's
// implicit_replication): replicated, but beside what comes from sharded parameters. In a
// model that fully_shard trains every rank has data of its own: a plain tensor that meets
// a registry entry, or a DTensor that comes from one (DTensorMeta::from_parameter), is
// this rank's own, where beside any other DTensor it counts as replicated, as in PyTorch.
// Nothing here depends on values, on numbers of elements, or on anything else that
// differs between ranks. A number that a caller wrote (a wrapped one) counts as no
// tensor, and must be the same on all ranks (scalar_hash.h); a tensor without dimensions
// may be a rank's own loss, and counts as one.
#pragma once

#include "dtensor/dispatch/operator_call.h"
#include "dtensor/dispatch/tensor_arguments.h"

#include <ATen/core/Tensor.h>

#include <string_view>

namespace fsdp::internal {

// What an operator meets, at the cost of a flag test per tensor.
struct TensorsMet {
  explicit TensorsMet(const TensorArguments& arguments);

  bool from_parameter = false;
  bool plain = false;  // but for numbers
  bool several_meshes = false;

  // Whether it has to be asked what to do with them.
  bool is_mixed() const { return from_parameter && (plain || several_meshes); }
};

// False for operators that read the shape or the dtype of another tensor, not its values,
// or would share its memory.
bool reads_values_of_all(std::string_view name);

// Whether the operator is to compute with whole values, so that its result is this rank's
// own and plain: it reads what comes from a parameter beside a plain tensor, or beside a
// DTensor on another mesh (what a tensor-parallel module computes), and writes no
// DTensor.
bool needs_whole_values(const TensorArguments& arguments);

// Puts whole(tensor) in the place of every DTensor on a mesh of what comes from
// parameters. Collective where `whole` is.
using WholeValue = at::Tensor (*)(const at::Tensor& dtensor);
void make_whole(TensorArguments& arguments, WholeValue whole);

// The value gathered, outside autograd. Collective. Throws ValueError where a gradient
// would have to flow: it would be this rank's own, too.
at::Tensor gathered_value(const at::Tensor& dtensor);

// Where what comes from a parameter is written, each rank keeps its part of what it has
// beside it, so the ranks must have the same: they compare plain tensors at once. Two
// kinds are compared later: tensors without dimensions, such as a learning rate or a
// clipping coefficient, where what is written is cut, and what is only copied, into
// anything but a part of a parameter. Of a parameter, at its next gather
// (DTensorOwner::before_factors, after_overwrite); of anything else, when the value
// becomes whole, as numbers are (scalar_hash.h). Throws ValueError on every rank where
// they differ. Collective where something is compared at once, which the ranks decide
// alike.
void check_written_alike(const OperatorCall& call, const TensorArguments& arguments);

}  // namespace fsdp::internal
