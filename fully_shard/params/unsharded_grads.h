// Unsharded gradients of one group that are accumulated for a later reduction (PyTorch's
// unsharded_accumulated_grad): on the members, as autograd leaves them, or here, where
// they are added up in another dtype than the member's. Local.
#pragma once

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

class UnshardedGrads {
 public:
  // `info` and `params` outlive it. `writes`: of the group, for tripwires.
  UnshardedGrads(const GroupInfo& info, std::vector<FSDPParam>& params,
                 std::weak_ptr<ShardWrites> writes);
  ~UnshardedGrads();
  UnshardedGrads(const UnshardedGrads&) = delete;

  // What autograd left on the member of parameter `index` waits, to be added up in
  // `dtype`.
  void keep(int64_t index, at::ScalarType dtype);
  bool waits(int64_t index) const;
  // All that waits, without a graph, of the member's dtype or of what it was added up in;
  // undefined for none. A tripwire stays on the member. Throws NotImplementedError where
  // the layout is not strided.
  at::Tensor take(int64_t index);
  // Whether take() has left tripwires since they were last removed.
  bool has_left_tripwires() const { return has_left_tripwires_; }
  void remove_tripwires();
  void drop(int64_t index);

 private:
  at::Tensor take_from_member(int64_t index);
  void check_layout(const at::Tensor& gradient, int64_t index) const;
  void count(int64_t index);
  void set_counted(int64_t index, int64_t bytes);
  FSDPParam& param(int64_t index) { return params_[static_cast<size_t>(index)]; }

  const GroupInfo& info_;
  std::vector<FSDPParam>& params_;
  std::weak_ptr<ShardWrites> writes_;
  std::vector<at::Tensor> sums_;  // by parameter; undefined for none
  std::vector<int64_t> bytes_;    // by parameter, as counted
  bool has_left_tripwires_ = false;
};

}  // namespace fsdp::internal
