// What a State holds, by the folder ("item") it is saved in, and whether a checkpoint can
// hold it, checked before anything is written. An item's tensors are in the order of the
// model on every rank.
#pragma once

#include "checkpoint/checkpoint.h"
#include "checkpoint/format/json.h"

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
  std::string codec = {};      // what its codes are called, if it is stored as some
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

// The step count of a learning-rate scheduler, all the state that LibTorch's have besides
// the learning rates, which lie in the optimizer's options.
unsigned step_count(const torch::optim::LRScheduler& scheduler);
void set_step_count(torch::optim::LRScheduler& scheduler, unsigned count);

// An item as it is saved.
struct SaveItem {
  std::string name;  // the folder
  std::string kind;
  std::vector<NamedTensor> tensors;
  std::map<std::string, std::string> ties;
  Json details = Json::object();
};

// Throws ValueError for a name that is not UTF-8, as JSON must be, and for
// "__metadata__", which safetensors files keep for themselves.
void check_name(const std::string& name);

// Throws ValueError for a tensor that is undefined, not strided, or on the meta device,
// by its name.
void check_has_values(const NamedTensor& named);

// Both, of all tensors and their other names.
void check_savable(const std::vector<SaveItem>& items);

// The text of `json`, of a value called `name`. Throws ValueError for strings that are
// not UTF-8.
std::string text_of(const Json& json, const std::string& name);

}  // namespace fsdp::internal::checkpoint
