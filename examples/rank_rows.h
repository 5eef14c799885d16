// Numbers that every rank has, brought together.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

namespace examples {

// Row r, on the CPU, is rank r's `mine`, of one dimension and as long on every rank.
// Collective over the mesh.
at::Tensor rows_of_ranks(const at::Tensor& mine, const fsdp::DeviceMesh& mesh);

}  // namespace examples
