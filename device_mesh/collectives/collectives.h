// The collectives the upper layers use, on plain contiguous tensors over one c10d group.
// The only file that knows ProcessGroup's call conventions, so that nobody else includes
// c10d's heavy headers.
//
// Every function here is collective over `group`: all its ranks must call in the same
// order with the same sizes. Each returns at once with a Pending; the tensors must stay
// alive and untouched until wait() returns. On CUDA the collective is ordered after the
// work on the current stream, and wait() makes the current stream wait without blocking
// the host.
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/pending.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

namespace fsdp::internal {

enum class ReduceOp { kSum, kAvg, kMin, kMax, kProduct };

// output: group_size * input.numel(), rank-major.
Pending all_gather(const Group& group, at::Tensor output, at::Tensor input);
// input: group_size rows; output: one row, the reduction over ranks of row `rank`.
Pending reduce_scatter(const Group& group, at::Tensor output, at::Tensor input, ReduceOp op);
Pending all_reduce(const Group& group, at::Tensor tensor, ReduceOp op);
Pending broadcast(const Group& group, at::Tensor tensor, int64_t root_group_rank);
// Row i of `input` goes to rank i; row i of `output` comes from rank i. Equal rows.
Pending all_to_all(const Group& group, at::Tensor output, at::Tensor input);
void barrier(const Group& group);

}  // namespace fsdp::internal
