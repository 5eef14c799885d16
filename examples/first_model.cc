// The first model: ordinary LibTorch code that trains sharded after one line per block.
//
//   ./first_model                                           # one process
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost ./first_model & done; wait
//   torchrun --nproc-per-node 4 --no-python ./first_model   # or another launcher
//
// Every rank trains on its part of one batch, and gradients are means over the ranks. So
// the last line is the same on 1, 2, 3 and 4 ranks.
#include "fully_shard/fully_shard.h"

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>
#include <string>
#include <vector>

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl(int64_t inputs, int64_t width, int64_t classes)
      : stem(register_module("stem", torch::nn::Linear(inputs, width))),
        head(register_module("head", torch::nn::Linear(width, classes))) {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(width)));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = stem(x);
    for (auto& block : blocks) x = block(x);
    return head(x);
  }

  torch::nn::Linear stem, head;
  std::vector<Block> blocks;
};
TORCH_MODULE(Classifier);

int main() {
  // On GPUs: torch::kCUDA, and inputs and targets .to(fsdp::local_device(mesh)).
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::launch_environment().world_size});

  torch::manual_seed(1);  // every rank starts with the same weights
  Classifier model(16, 32, 10);
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
  fsdp::fully_shard(model, mesh);
  torch::optim::AdamW optimizer(model->parameters(), /*lr=*/3e-3);  // after fully_shard

  // A batch that all ranks make alike, and of it the part of this rank.
  const auto inputs = torch::randn({96, 16}).chunk(mesh.size())[mesh.rank()];
  const auto targets = torch::randint(10, {96}).chunk(mesh.size())[mesh.rank()];

  double first = 0, last = 0;
  for (int step = 1; step <= 24; ++step) {
    auto loss = torch::nn::functional::cross_entropy(model->forward(inputs), targets);
    loss.backward();
    fsdp::clip_grad_norm_(model->parameters(), /*max_norm=*/1.0);
    optimizer.step();
    optimizer.zero_grad();
    last = fsdp::all_reduce(loss.item<double>(), mesh, fsdp::Reduce::kMean);
    if (step == 1) first = last;
    if (step % 4 == 0 && fsdp::is_rank_zero()) std::printf("step %d: loss %.3f\n", step, last);
  }
  if (fsdp::is_rank_zero()) std::printf("loss %.3f -> %.3f\n", first, last);
  fsdp::destroy_process_group();
}
