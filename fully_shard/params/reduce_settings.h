// How the gradients of a group are reduced: dtype, divisor, hook, and over which ranks
// (PyTorch's reduce_dtype, gradient_divide_factor, all_reduce_hook, reduce_grads and
// all_reduce_grads of FSDPParamGroup). Local.
#pragma once

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/reduce_scatter_input.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::internal {

class ReduceSettings {
 public:
  // `info` outlives it.
  ReduceSettings(const GroupInfo& info, const std::vector<FSDPParam>& params);

  // Gradients are added up, over backwards and over the ranks, in `dtype` instead of the
  // members' own; complex ones stay what they are.
  void set_dtype(std::optional<at::ScalarType> dtype) { dtype_ = dtype; }
  at::ScalarType dtype_of(const FSDPParam& param) const;

  // Called with the sum over all ranks, [elements] of sum_dtype, before it is divided,
  // once per reduction and in the same order on all ranks; what it writes is published.
  using Hook = std::function<void(const at::Tensor& sum)>;
  void set_hook(Hook hook) { hook_ = std::move(hook); }
  // `row`: a received row of `input`.
  void run_hook(const ReduceScatterInput& input, const at::Tensor& row) const;

  double divisor() const;
  bool synchronizes() const;
  // Hybrid sharding: reductions go on over the replicas.
  bool reduces_over_replicas() const;
  // One rank, where no hook wants rows: gradients go to the entries at once.
  bool stays_here() const;
  // Parameters that no rank used get zeros, not nothing.
  bool publishes_unused() const;

 private:
  const GroupInfo& info_;
  bool has_replicated_members_;  // tensor-parallel ones
  std::optional<at::ScalarType> dtype_ = {};
  Hook hook_ = {};
};

}  // namespace fsdp::internal
