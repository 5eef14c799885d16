// Everything fully_shard refuses, checked before anything is changed. Local.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/policies.h"
#include "fully_shard/units/managed_modules.h"

#include <string>
#include <vector>

namespace fsdp::internal {

std::string module_type_name(const torch::nn::Module& module);
// ModuleList and its like, which hold no members either.
bool is_container_without_forward(const torch::nn::Module& module);

// The modules, the mesh and the options by themselves.
void validate_request(const std::vector<torch::nn::Module*>& modules, const DeviceMesh& mesh,
                      const FullyShardOptions& options);
// What the walk found.
void validate_parameters(const std::vector<torch::nn::Module*>& modules,
                         const ManagedModules& managed, const DeviceMesh& mesh,
                         const FullyShardOptions& options);

}  // namespace fsdp::internal
