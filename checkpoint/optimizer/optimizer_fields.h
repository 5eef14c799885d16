// The state and options of an optimizer as fields, by name, without knowing its class:
// what its own serialize() writes, seen before it becomes a file. Nothing is copied.
// Also whether fields are of its class, how they come to lie, and forgetting them. Local.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <set>
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

// The numbers among fields, which checkpoints keep as tensors without dimensions: int64,
// bool or double.
bool is_number(const c10::IValue& value);
at::Tensor number_tensor(const c10::IValue& value);

// By parameter handle; one entry of `options` per group.
struct OptimizerFields {
  std::map<void*, Fields> state;
  std::vector<Fields> options;
};
// Through the optimizer's own load(): the right classes of state and options, holding the
// very tensors of `fields`. State of parameters without an entry stays. Throws
// ValueError, having changed nothing, for fields of another class.
void set_fields(torch::optim::Optimizer& optimizer, const OptimizerFields& fields);

// "torch::optim::AdamW".
std::string class_of(const torch::optim::Optimizer& optimizer);

// Whether options with these names may be this optimizer's: all of its options, some of
// them, or more. Stock optimizers differ but Adam and AdamW. State of another class would
// make LibTorch fail in the middle, or step on from something else.
bool has_options_like(const torch::optim::Optimizer& optimizer, const std::set<std::string>& names);

// Makes the state of the parameters with these handles as it was before their first step:
// erases it, or, of Adagrad, which makes its state when it is made and needs it to step,
// makes a new one.
void forget_state(torch::optim::Optimizer& optimizer, const std::set<const void*>& handles);

// Where a tensor is in a parameter's state.
struct StatePlace {
  std::string field;
  int64_t index = -1;  // in a list of tensors
};

// How a tensor of an optimizer's state comes to lie when it is loaded or set.
class StatePlacement {
 public:
  explicit StatePlacement(const torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  // The tensor as which one of global shape `shape` lies: what the optimizer has in that
  // place, where that is distributed and of this shape, as it is of optimizers that place
  // state otherwise than its parameter and make it when they are made (OwnedStep); else
  // the parameter, where it has its shape. Undefined: plain. Local.
  at::Tensor like(const at::Tensor& parameter, const StatePlace& place,
                  at::IntArrayRef shape) const;
  // The same of this rank's part alone, whose shape says nothing.
  at::Tensor like_of_part(const at::Tensor& parameter, const StatePlace& place) const;

 private:
  // Undefined where there is none, or it is plain.
  at::Tensor distributed_at(const at::Tensor& parameter, const StatePlace& place) const;

  const torch::optim::Optimizer& optimizer_;
  mutable std::map<const void*, Fields> fields_;  // read so far, by parameter
};

}  // namespace fsdp::internal::checkpoint
