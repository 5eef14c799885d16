// The sharded gradient: how a reduced part is accumulated into the registry entry's .grad
// (PyTorch's sharded_param.grad).
//
// Hooks that the user registered on the entry are called with this backward's reduced
// gradient and may replace it by one of the same placement; then it is added to .grad;
// then the entry's post-accumulate hooks follow. Once per reduction, at its end. Local.
#pragma once

#include "fully_shard/params/fsdp_param.h"

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// `part`: this rank's, of the shard's shape and the parameter's dtype. Throws ValueError,
// naming the parameter, where a hook or the user put something else than a DTensor placed
// like the parameter.
void accumulate_sharded_grad(FSDPParam& param, const at::Tensor& part, int64_t global_rank);

}  // namespace fsdp::internal
