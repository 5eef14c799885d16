// Which parameters of a module a plan means, and how it has them cut.
#pragma once

#include "device_mesh/device_mesh.h"
#include "dtensor/tensor/dtensor_spec.h"
#include "tensor_parallel/internal/parameter_uses.h"
#include "tensor_parallel/parallel_plan.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

struct PlannedParameter {
  std::string path;  // the first, if it is tied
  at::Tensor member;
  DTensorSpec spec;
  ParameterUses uses;
  Batches batches = Batches::kOne;
};

// In the module's order, each once. Local. Throws ValueError as parallelize_module().
std::vector<PlannedParameter> planned_parameters(torch::nn::Module& module, const DeviceMesh& mesh,
                                                 const ParallelPlan& plan);

}  // namespace fsdp::internal
