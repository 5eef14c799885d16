// Hybrid sharding: what reductions that did not go on over the replicas have summed over
// the shards (PyTorch's partial_reduce_output), undivided, until one does. Local.
#pragma once

#include "fully_shard/params/group_accounts.h"
#include "fully_shard/params/reduce_scatter_input.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal {

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

}  // namespace fsdp::internal
