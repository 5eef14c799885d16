// Collectives that are not announced, for functions that somebody else's announced
// operation calls (AllGatherOptions::custom, ReduceScatterOptions::custom): the ranks
// know by then that all of them are in that operation. On a group of the function's own,
// so that what is sent meets nothing else.
#pragma once

#include "device_mesh/collectives/group.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>

namespace c10d {
class Work;
}

namespace fsdp::internal {

// `output`: group size * input.numel(), rank-major. Both contiguous, and untouched until
// the work was waited for. Collective over `group`; does not block.
c10::intrusive_ptr<c10d::Work> all_gather_inside(const Group& group, const at::Tensor& output,
                                                 const at::Tensor& input);
// `input`: group size rows; `output`: this rank's, summed, 16-bit types in float on the
// CPU. `finish`, if any, runs when the sum is there. Collective over `group`; does not
// block.
c10::intrusive_ptr<c10d::Work> reduce_scatter_inside(const Group& group, const at::Tensor& output,
                                                     const at::Tensor& input,
                                                     std::function<void()> finish = {});

}  // namespace fsdp::internal
