// Hybrid sharding: the ranks of a node share the shards of one replica of the model, and
// nodes hold the same shards. Gathers stay within a node; between nodes travels one
// all-reduce of this rank's gradient shards, here once per step of two micro-batches.
//
// Here a node has two ranks, so it takes 2 ranks (one node) or 4 (two):
//
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1 2 3; do
//     RANK=$r WORLD_SIZE=4 MASTER_ADDR=localhost ./hybrid_sharding &
//   done; wait
//   torchrun --nproc-per-node 4 --no-python ./hybrid_sharding   # or another launcher
//
// Model and batch are those of first_model.cc, and so is the last line.
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
  // Dimensions "replicate" and "shard", in that order: with 4 ranks a mesh of 2 x 2.
  auto mesh = fsdp::init_hybrid_mesh(torch::kCPU, /*ranks_per_node=*/2);

  torch::manual_seed(1);  // every rank starts with the same weights
  Classifier model(16, 32, 10);
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
  auto unit = fsdp::fully_shard(model, mesh);
  torch::optim::AdamW optimizer(model->parameters(), /*lr=*/3e-3);  // after fully_shard

  int64_t held = 0, all = 0;
  for (const auto& parameter : model->parameters()) {
    held += fsdp::DTensor(parameter).to_local().numel();
    all += parameter.numel();
  }
  std::printf("rank %d is shard %d of replica %d and holds %d of %d elements\n", int(mesh.rank()),
              int(mesh.local_rank(1)), int(mesh.local_rank(0)), int(held), int(all));

  // A batch that all ranks make alike, and of it the part of this rank: replicas see
  // different data, too.
  const auto inputs = torch::randn({96, 16}).chunk(mesh.size())[mesh.rank()].chunk(2);
  const auto targets = torch::randint(10, {96}).chunk(mesh.size())[mesh.rank()].chunk(2);

  double first = 0, last = 0;
  for (int step = 1; step <= 24; ++step) {
    double loss_here = 0;
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      unit.set_requires_all_reduce(micro_batch == 1);  // until then, sums stay in the node
      const auto outputs = model->forward(inputs[micro_batch]);
      auto loss = torch::nn::functional::cross_entropy(outputs, targets[micro_batch]) / 2;
      loss.backward();
      loss_here += loss.item<double>();
    }
    fsdp::clip_grad_norm_(model->parameters(), /*max_norm=*/1.0);
    optimizer.step();
    optimizer.zero_grad();
    last = fsdp::all_reduce(loss_here, mesh, fsdp::Reduce::kMean);
    if (step == 1) first = last;
    if (step % 4 == 0 && fsdp::is_rank_zero()) std::printf("step %d: loss %.3f\n", step, last);
  }
  if (fsdp::is_rank_zero()) std::printf("loss %.3f -> %.3f\n", first, last);
  fsdp::destroy_process_group();
}
