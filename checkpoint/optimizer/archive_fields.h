// The fields of an optimizer's state or options, by name, without knowing its class: what
// its own serialize() writes, seen before it becomes a file. Nothing is copied.
#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
class OptimizerParamState;
}  // namespace torch::optim

namespace fsdp::internal::checkpoint {

using Fields = std::map<std::string, c10::IValue>;

Fields fields_of(const torch::optim::OptimizerOptions& options);
Fields fields_of(const torch::optim::OptimizerParamState& state);

// By parameter handle; one entry of `options` per group.
struct OptimizerFields {
  std::map<void*, Fields> state;
  std::vector<Fields> options;
};
// Through the optimizer's own load(): the right classes of state and options, holding the
// very tensors of `fields`. State of parameters without an entry stays. Throws
// ValueError, having changed nothing, for fields of another class.
void set_fields(torch::optim::Optimizer& optimizer, const OptimizerFields& fields);

}  // namespace fsdp::internal::checkpoint
