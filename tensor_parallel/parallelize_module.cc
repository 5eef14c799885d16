#include "tensor_parallel/parallelize_module.h"

#include "device_mesh/internal/given_module.h"
#include "tensor_parallel/internal/agreement.h"
#include "tensor_parallel/internal/generators_in_step.h"
#include "tensor_parallel/internal/parallel_member.h"
#include "tensor_parallel/internal/planned_parameters.h"

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace fsdp {

void parallelize_module(ModuleRef module, const DeviceMesh& mesh, const ParallelPlan& plan) {
  auto& root = internal::given_module("parallelize_module", module);
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "parallelize_module: mesh has ", mesh.ndim(),
                    " dimensions; pass a slice of one, such as mesh[\"tp\"] (rank ", mesh.rank(),
                    ")");
  const auto parameters = internal::planned_parameters(root, mesh, plan);
  const auto number = internal::check_agreement(parameters, mesh);
  internal::bring_generators_in_step(mesh);
  const auto steps = std::make_shared<internal::FirstSteps>();
  for (const auto& parameter : parameters) internal::make_parallel_member(parameter, number, steps);
}

}  // namespace fsdp
