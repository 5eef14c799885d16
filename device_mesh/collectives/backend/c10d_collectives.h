// The collectives of a c10d group as its backend has them, not announced: for the files
// of device_mesh/collectives alone (tools/check_collectives). Everybody else calls
// Collectives (collectives.h), which tells the other ranks first.
//
// Plain contiguous tensors. Every function is collective over `group`: all its ranks must
// call in the same order with the same sizes. Each returns at once with a Pending; the
// tensors must stay alive and untouched until wait() returns. On CUDA the collective is
// ordered after the work on the current stream, and wait() makes the current stream wait
// without blocking the host.
#pragma once

#include "device_mesh/collectives/backend/pending.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/operations.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Messages between two ranks of one group, told apart by tags: messages of the same tag
// from the same rank arrive in order, and messages of different tags never meet. On Gloo
// they take half the time of a collective of the same bytes, since no thread but the
// caller's and the transport's own is involved. CPU only.

// Of the notices of an issue log: none that a user of the same group would choose.
inline constexpr int kNoticeTag = 1 << 30;
// Of what is sent to see whether a link still is there, and nobody receives (pending.cc).
inline constexpr int kProbeTag = kNoticeTag - 1;
// Of what follows a notice: different for whatever differs in kind, unit, size or
// history, and never kNoticeTag, so bytes of operations that do not belong together never
// meet (Gloo would end the process where their sizes differ).
int tag_of(const Stamp& stamp);

// Whether a collective of `memory` had better be made of messages: on Gloo, and in a
// group of one, where nothing is sent.
bool better_by_messages(const Group& group, const at::Tensor& memory);

// Both return at once; the tensor, contiguous bytes, must stay alive and untouched until
// wait() returns. Pending::finished() says nothing about them.
Pending send(const Group& group, at::Tensor bytes, int64_t to, int tag);
Pending receive(const Group& group, at::Tensor bytes, int64_t from, int tag);

// output: group_size * input.numel(), rank-major.
Pending all_gather(const Group& group, const at::Tensor& output, const at::Tensor& input);
// input: group_size rows; output: one row, the reduction over ranks of row `rank`.
Pending reduce_scatter(const Group& group, const at::Tensor& output, const at::Tensor& input,
                       ReduceOp op);
Pending all_reduce(const Group& group, at::Tensor tensor, ReduceOp op);
Pending broadcast(const Group& group, const at::Tensor& tensor, int64_t root_group_rank);
// Row i of `input` goes to rank i; row i of `output` comes from rank i. Equal rows.
Pending all_to_all(const Group& group, const at::Tensor& output, const at::Tensor& input);
// The first `to[0]` elements of `input` go to rank 0, and so on; the first `from[0]` of
// `output` come from there.
Pending all_to_all_of_sizes(const Group& group, const at::Tensor& output, const at::Tensor& input,
                            const std::vector<int64_t>& from, const std::vector<int64_t>& to);
Pending barrier(const Group& group);

// What these throw, ValueError, for sizes, strides, dtypes or roots that are wrong.
void check_gather(const Group& group, const at::Tensor& output, const at::Tensor& input);
void check_reduce_scatter(const Group& group, const at::Tensor& output, const at::Tensor& input);
void check_broadcast(const Group& group, int64_t root_group_rank);
void check_all_to_all(const Group& group, const at::Tensor& output, const at::Tensor& input);

}  // namespace fsdp::internal
