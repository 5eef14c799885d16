// A run of a random program's sharded side alone, on any device, and the values of it.
// The host reads none of them before the end, so that streams may be late until then.
#pragma once

#include "device_mesh/device_mesh.h"
#include "tests/fully_shard/random_programs/random_model.h"
#include "tests/fully_shard/random_programs/random_program.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {

struct KeptValue {
  std::string what;
  at::Tensor value;  // on the CPU; undefined where there was none
};

// All outputs, losses, gradients and parameters that this rank gets, in the order in
// which they came to be. `move_the_rest` takes what no unit has to the mesh's device.
// Collective. An exception that the program does not plan leaves.
std::vector<KeptValue> run_sharded(
    const Program& program, const DeviceMesh& mesh,
    const std::function<void(const RandomModel&)>& move_the_rest = {});

}  // namespace fsdp::testing
