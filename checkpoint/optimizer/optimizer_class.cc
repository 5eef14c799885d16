#include "checkpoint/optimizer/optimizer_class.h"

#include "checkpoint/optimizer/archive_fields.h"

#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <typeinfo>

namespace fsdp::internal::checkpoint {

std::string class_of(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

bool has_options_like(const torch::optim::Optimizer& optimizer,
                      const std::set<std::string>& names) {
  std::set<std::string> own;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& [name, value] : fields_of(group.options())) own.insert(name);
  }
  return std::includes(own.begin(), own.end(), names.begin(), names.end()) ||
         std::includes(names.begin(), names.end(), own.begin(), own.end());
}

}  // namespace fsdp::internal::checkpoint
