// The comparison that set_check_replicated() asks for.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <string_view>

namespace fsdp::internal {

bool compares_plain();

// Throws ValueError on every rank of the mesh where plain tensors among `operands` of
// `what` are not the same on all of them. Nothing unless set_check_replicated(true).
// Collective over the mesh where it is.
void compare_plain(std::string_view what, at::TensorList operands, const DeviceMesh& mesh);

}  // namespace fsdp::internal
