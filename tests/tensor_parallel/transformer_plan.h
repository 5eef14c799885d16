// The plan of the example's transformer, and its loss in the dtype of the logits.
#pragma once

#include "programs/trainer/model/transformer_plan.h"

#include <torch/torch.h>

namespace fsdp::testing {

using programs::transformer_plan;

inline at::Tensor transformer_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

}  // namespace fsdp::testing
