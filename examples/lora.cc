// LoRA: the pretrained model is frozen, and two small matrices beside each of its layers
// are trained. Gradients are reduced, and states of the optimizer kept, for these alone.
//
//   ./lora                                           # one process
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost ./lora & done; wait
//   torchrun --nproc-per-node 4 --no-python ./lora   # or another launcher
//
// With an argument, "./lora runs/step-24", it starts from the model that
// checkpoints.cc trained. The last line is the same on 1, 2, 3 and 4 ranks.
#include "checkpoint/checkpoint.h"
#include "fully_shard/fully_shard.h"

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>
#include <string>
#include <vector>

// W x + B (A x): the Linear's own W is frozen, A and B are trained.
struct LoraLinearImpl : torch::nn::LinearImpl {
  LoraLinearImpl(int64_t inputs, int64_t outputs, int64_t rank)
      : LinearImpl(inputs, outputs),
        lora_a(register_module("lora_a", without_bias(inputs, rank))),
        lora_b(register_module("lora_b", without_bias(rank, outputs))) {
    torch::nn::init::zeros_(lora_b->weight);  // the model starts as the pretrained one
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return LinearImpl::forward(x) + lora_b(lora_a(x));
  }

  static torch::nn::Linear without_bias(int64_t inputs, int64_t outputs) {
    return torch::nn::Linear(torch::nn::LinearOptions(inputs, outputs).bias(false));
  }

  torch::nn::Linear lora_a, lora_b;
};
TORCH_MODULE(LoraLinear);

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t rank)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", LoraLinear(width, 4 * width, rank))),
        down(register_module("down", LoraLinear(4 * width, width, rank))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm;
  LoraLinear up, down;
};
TORCH_MODULE(Block);

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl(int64_t inputs, int64_t width, int64_t classes, int64_t rank)
      : stem(register_module("stem", torch::nn::Linear(inputs, width))),
        head(register_module("head", torch::nn::Linear(width, classes))) {
    for (int i = 0; i < 4; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(width, rank)));
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

int main(int argc, char** argv) {
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::launch_environment().world_size});

  torch::manual_seed(1);  // every rank starts with the same weights
  Classifier model(16, 32, 10, /*rank=*/4);
  for (auto& item : model->named_parameters())
    item.value().requires_grad_(item.key().find("lora_") != std::string::npos);
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
  fsdp::fully_shard(model, mesh);
  // Layers are named as in the pretrained model, and adapters stay as they are.
  if (argc > 1) fsdp::load({.model = model}, argv[1], {.leave = {"block*.*.lora_*.weight"}});

  std::vector<torch::Tensor> adapters;
  int64_t trained = 0, all = 0;
  for (const auto& parameter : model->parameters()) {
    all += parameter.numel();
    if (!parameter.requires_grad()) continue;
    trained += parameter.numel();
    adapters.push_back(parameter);
  }
  if (fsdp::is_rank_zero()) std::printf("trains %d of %d elements\n", int(trained), int(all));
  torch::optim::AdamW optimizer(adapters, /*lr=*/5e-3);

  const auto frozen_before = model->stem->weight.clone();

  // A batch that all ranks make alike, and of it the part of this rank.
  const auto inputs = torch::randn({96, 16}).chunk(mesh.size())[mesh.rank()];
  const auto targets = torch::randint(10, {96}).chunk(mesh.size())[mesh.rank()];

  double first = 0, last = 0;
  for (int step = 1; step <= 60; ++step) {
    auto loss = torch::nn::functional::cross_entropy(model->forward(inputs), targets);
    loss.backward();
    fsdp::clip_grad_norm_(adapters, /*max_norm=*/1.0);
    optimizer.step();
    optimizer.zero_grad();
    last = fsdp::all_reduce(loss.item<double>(), mesh, fsdp::Reduce::kMean);
    if (step == 1) first = last;
    if (step % 10 == 0 && fsdp::is_rank_zero()) std::printf("step %d: loss %.3f\n", step, last);
  }
  TORCH_CHECK(torch::equal(model->stem->weight, frozen_before), "a frozen weight has changed");
  if (fsdp::is_rank_zero()) std::printf("loss %.3f -> %.3f\n", first, last);
  fsdp::destroy_process_group();
}
