// The sharded gradient: how a reduced part is accumulated into the registry entry's .grad
// (PyTorch's sharded_param.grad).
//
// Hooks that the user registered on the entry are called with this backward's reduced
// gradient and may replace it by one of the same placement; then it is added to .grad;
// then the entry's post-accumulate hooks follow. Once per reduction, at its end. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/reduce_scatter.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// `part`: this rank's, of the shard's shape, cast to the parameter's dtype here. Throws
// ValueError, naming the parameter, where a hook or the user put something else than a
// DTensor placed like the parameter.
void accumulate_sharded_grad(FSDPParam& param, const at::Tensor& part, int64_t global_rank);

// Hybrid sharding: what reductions that did not go on over the replicas have summed over
// the shards (PyTorch's partial_reduce_output), undivided, until one does. Local.
class PartialReduceOutput {
 public:
  PartialReduceOutput(size_t param_count, const GroupAccounts& accounts);
  ~PartialReduceOutput();
  PartialReduceOutput(const PartialReduceOutput&) = delete;

  // This rank's part of parameter `index`, of sum_dtype; added to what was kept.
  void keep(int64_t index, const at::Tensor& part);
  bool has(int64_t index) const { return parts_[static_cast<size_t>(index)].defined(); }
  bool has_any() const;
  // Adds what was kept to `row`, a received row of `input`, and keeps it no longer.
  void add_to(ReduceScatterInput& input, at::Tensor& row);
  void drop(int64_t index);

 private:
  const GroupAccounts& accounts_;
  std::vector<at::Tensor> parts_;  // by parameter; undefined for none
};

// A gradient that comes as a DTensor, as the plain tensor that this rank brings to the
// reduction of its unit. A penalty against sharded values, (weight - reference)², has
// such gradients.
//
// The reduction adds up what the ranks bring and divides by their number, so what a
// DTensor lies as decides what comes back as its value:
//
//   along ranks of the unit's mesh          a rank brings
//   Replicate()                             what it has
//   Shard(d)                                its own part, once per rank; zeros elsewhere
//   Partial(sum), Partial(avg)              its term, once per rank; its term
//
// Along other dimensions (tensor parallelism) every rank needs the whole, and it moves.

// [the DTensor's global shape], of its dtype. `unit_mesh`: over which the unit's
// reduction goes, which may be flattened from the dimensions of the gradient's mesh
// (context parallelism). Moves nothing where `gradient` is whole along the dimensions of
// its mesh that reach ranks outside of the unit's; else collective over these.
at::Tensor gradient_share(const at::Tensor& gradient, const DeviceMesh& unit_mesh);

// The same of a tensor-parallel parameter, whose mesh `home` has: the last dimensions of
// the gradient's, along which it lies as it came. A DTensor on `home`.
at::Tensor tensor_parallel_share(const at::Tensor& gradient, const DeviceMesh& unit_mesh,
                                 const DeviceMesh& home);

// Gradients of registry entries that are whole and plain. A custom autograd::Function
// that is given an entry computes with the whole value, so its backward returns a
// gradient of this rank's whole parameter, like a member's, and autograd would put it on
// the entry as it is: neither reduced nor sharded. It is led to the member instead, where
// whole gradients are reduced from.

// To be called while a graph that ends in `entry` is recorded and the whole value is
// used; nothing where no graph ends there. Gradients that are DTensors stay the entry's.
// Local.
void lead_whole_gradients(const at::Tensor& entry, const at::Tensor& member);

}  // namespace fsdp::internal
