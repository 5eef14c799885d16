// Gradients of replicated tensor-parallel members that come as terms of a sum over the
// tensor-parallel ranks. They wait for those of the other parameters of a group, so that
// all are summed at once.
#pragma once

#include "fully_shard/params/group_accounts.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace fsdp::internal {

class TensorParallelTerms {
 public:
  explicit TensorParallelTerms(const GroupAccounts& accounts) : accounts_(accounts) {}
  ~TensorParallelTerms() { drop(); }
  TensorParallelTerms(const TensorParallelTerms&) = delete;

  // `gradient`: a DTensor, of parameter `index`; added to what was kept, in `dtype`.
  void keep(int64_t index, const at::Tensor& gradient, at::ScalarType dtype);
  bool has(int64_t index) const;
  // The sums, plain and whole, with their parameters; none is kept any longer. Collective
  // over the meshes of the members.
  std::vector<std::pair<int64_t, at::Tensor>> take_sums();
  void drop();

 private:
  struct Term {
    int64_t index;
    at::Tensor gradient;
  };

  const GroupAccounts& accounts_;
  std::vector<Term> terms_;  // of a running backward
};

}  // namespace fsdp::internal
