// A program outside the repository: one sharded step, whose result is the same on any
// number of ranks.
#include "device_mesh/process_group.h"
#include "fully_shard/fully_shard.h"

#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = fsdp::launch_environment().world_size;
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {world});
  torch::nn::Linear model(torch::nn::LinearOptions(3, 4).bias(false));
  torch::nn::init::ones_(model->weight);
  fsdp::fully_shard(model, mesh);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.25);
  const auto input = torch::ones({1, 3});
  model->forward(input).sum().backward();
  optimizer.step();
  const auto rows = fsdp::DTensor(model->parameters()[0]).to_local().size(0);
  const auto sum = model->forward(input).sum().item<double>();
  std::cout << "rank " << mesh.rank() << " of " << world << " holds " << rows << " of 4 rows, sum "
            << sum << "\n";
  fsdp::destroy_process_group();
}
