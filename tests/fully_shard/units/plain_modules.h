// Modules without a type of their own, for what is decided by structure alone.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

using ModulePtr = std::shared_ptr<torch::nn::Module>;
using NamedModules = std::vector<std::pair<std::string, ModulePtr>>;

// Nothing but children.
inline ModulePtr bare(const NamedModules& children = {}) {
  auto made = std::make_shared<torch::nn::Module>();
  for (const auto& [name, child] : children) made->register_module(name, child);
  return made;
}
// And one parameter, "weight" [4].
inline ModulePtr weighted(const NamedModules& children = {}) {
  auto made = bare(children);
  made->register_parameter("weight", torch::ones({4}));
  return made;
}

}  // namespace fsdp::testing
