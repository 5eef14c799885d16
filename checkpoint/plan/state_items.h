// The tensors of a State, by the folder ("item") they are saved in. An item's tensors are
// in the order of the model on every rank.
#pragma once

#include "checkpoint/checkpoint.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  const void* unit = nullptr;  // what is of one is gathered together; null: of none
};
// The unit of fully_shard() that shards `parameter`, known by its address; null for none.
const void* unit_of(const at::Tensor& parameter);

struct ModelTensors {
  std::vector<NamedTensor> tensors;         // each tensor once, by its first name
  std::map<std::string, std::string> ties;  // its other names -> the first
};
// Parameters, then buffers.
ModelTensors tensors_of(const torch::nn::Module& module);

// The models of a State by item name: "model", "models/<key>".
std::map<std::string, torch::nn::Module*> models_of(const State& state);

struct OptimizerOf {
  torch::optim::Optimizer* optimizer = nullptr;
  std::string model;  // the item name of the model that names its parameters
};
// "optimizer", "optimizers/<key>". Throws ValueError where there is no such model.
std::map<std::string, OptimizerOf> optimizers_of(const State& state);

}  // namespace fsdp::internal::checkpoint
