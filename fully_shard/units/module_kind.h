// What a module is by its C++ type.
#pragma once

#include <string>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

std::string module_type_name(const torch::nn::Module& module);
// ModuleList, ModuleDict, ParameterList, ParameterDict: they compute nothing and hold no
// members, so nothing could touch what they register through them.
bool is_container_without_forward(const torch::nn::Module& module);

}  // namespace fsdp::internal
