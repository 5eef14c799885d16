// How a tensor of an optimizer's state comes to lie when it is loaded or set.
#pragma once

#include "checkpoint/optimizer/archive_fields.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

namespace fsdp::internal::checkpoint {

// Where a tensor is in a parameter's state.
struct StatePlace {
  std::string field;
  int64_t index = -1;  // in a list of tensors
};

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
