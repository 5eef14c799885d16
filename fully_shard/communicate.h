// A user's own collective, in the place of a unit's (FSDPModule::set_custom_all_gather,
// set_custom_reduce_scatter); ready-made ones: custom_collectives.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>

namespace c10d {
class Work;
}

namespace fsdp {

// From `input` into `output`, both flat and contiguous on the mesh's device; finished
// when the work is, null for at once. An all-gather finds this rank's row in `input`,
// bytes, and puts those of all ranks into `output`, in their order. A reduce-scatter
// finds one row per rank in `input` and adds up those of this rank into `output`,
// elements of the dtype that gradients are reduced in; the last elements of a row are
// counts, to be added up like the others.
using Communicate = std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& output,
                                                                 const at::Tensor& input)>;

}  // namespace fsdp
