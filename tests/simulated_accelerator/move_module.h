// A module's way to the simulated accelerator. torch::nn::Module::to() cannot: LibTorch
// has a list of device types that may replace each other in a parameter, and PrivateUse1
// is not in it.
#pragma once

#include <torch/nn/module.h>

namespace fsdp::testing::simulated {

// Parameters and buffers stay the same objects; gradients are dropped. Before
// fully_shard().
void move_to(torch::nn::Module& module, c10::Device device);
// The same of one parameter or buffer.
void move_to(at::Tensor& tensor, c10::Device device);

}  // namespace fsdp::testing::simulated
