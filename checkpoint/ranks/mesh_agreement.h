// How a call that sets what is distributed goes on or ends on all ranks of its meshes:
// where it cannot be done on one, none changes anything, and where it fails later all say
// that something has changed.
//
//   attempt_with_all(meshes, [&] { plan(); }, "set_model_state_dict");
//   attempt_with_all(meshes, [&] { write(); }, "set_model_state_dict: partly overwritten");
#pragma once

#include "checkpoint/ranks/world.h"
#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// The meshes of more than one rank on which those of `tensors` lie that are DTensors,
// each once, in the order of the tensors. Local.
std::vector<DeviceMesh> meshes_of(const std::vector<at::Tensor>& tensors);

// Calls `step`. What it throws on one rank, every rank of `meshes` throws, with every
// failed rank's text behind `what`; a rank tells the later meshes what it learned over
// the earlier ones. Collective over each mesh, in order; without meshes local.
void attempt_with_all(const std::vector<DeviceMesh>& meshes, const std::function<void()>& step,
                      const std::string& what);

}  // namespace fsdp::internal::checkpoint
