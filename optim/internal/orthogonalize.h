// The directions of many tensors, each matrix orthogonalized on one rank: where it is
// whole, or where an exchange brings it. Exchanges go in buckets, and while one is
// computed with, the next one travels.
#pragma once

#include "optim/internal/matrices.h"
#include "optim/internal/newton_schulz.h"
#include "optim/internal/owner_buckets.h"
#include "optim/muon_counters.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::internal {

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
