// What LibTorch's torch::save(optimizer, path) wrote, in the form in which save() keeps
// an optimizer: tensors by name, and options as JSON. Parameters have places there, not
// names, so this is read into an optimizer with the same groups over the same model.
#pragma once

#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/format/json.h"
#include "checkpoint/plan/state_items.h"

#include <absl/status/statusor.h>

#include <string>

namespace fsdp::internal::checkpoint {

struct LibTorchOptimizer {
  ModelTensors parameters;  // those of `optimizer`, named by their places: "groups.0.3"
  Catalog catalog;
  Json details;  // as of OptimizerTensors, and "values": scalars by name
};

// kInvalidArgument for a file of an optimizer with other groups, numbers of parameters or
// options, or with state of another shape; else an error for what is no such file.
absl::StatusOr<LibTorchOptimizer> read_libtorch_optimizer(const std::string& path,
                                                          const torch::optim::Optimizer& optimizer);

}  // namespace fsdp::internal::checkpoint
