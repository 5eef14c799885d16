// The directions of many tensors, each matrix orthogonalized on one rank: where it is
// whole, or where an exchange brings it. Exchanges go in buckets, and while one is
// computed with, the next one travels.
#pragma once

#include "optim/internal/matrices.h"
#include "optim/internal/owner_buckets.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp {
struct MuonCounters;  // optim/muon.h
}

namespace fsdp::internal {

// Newton-Schulz iteration towards the nearest semi-orthogonal matrix, as torch.optim.Muon
// has it: a quintic whose coefficients give steep slopes at zero, so that singular values
// end near one (K. Jordan et al., "Muon: An optimizer for hidden layers in neural
// networks", 2024).
struct NewtonSchulz {
  double a = 3.4445, b = -4.7750, c = 2.0315;
  double eps = 1e-7;  // the least Frobenius norm that is divided by
  int64_t steps = 5;
};

// Of each matrix in `stack`, any shape of `matrices` behind one another, bf16 and plain:
// bf16 of the same shape. One matrix per call of an operator, so that the bits do not
// depend on which others are there. Local; does not change `stack`.
at::Tensor orthogonalized(const at::Tensor& stack, const Matrices& matrices,
                          const NewtonSchulz& iteration);

struct ToOrthogonalize {
  at::Tensor like;  // shape and layout: plain, or a DTensor without Partial
  MatrixOptions matrices;
  NewtonSchulz iteration;
};

// `update_of(i)` makes the tensor to be orthogonalized, which lies as `like`; `apply(i,
// direction)` gets the result, in bf16, which lies so too. Each is called once per item,
// updates in no order of theirs. A larger item than `bucket_bytes` is a bucket of its
// own. Collective over the meshes of items that are cut.
void orthogonalize(const std::vector<ToOrthogonalize>& items,
                   c10::function_ref<at::Tensor(size_t)> update_of,
                   c10::function_ref<void(size_t, const at::Tensor&)> apply, MuonCounters& counters,
                   int64_t bucket_bytes = kBucketBytes);

}  // namespace fsdp::internal
