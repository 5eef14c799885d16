// Deferred init: a model that is larger than the memory of a rank. The constructor
// records shapes and how each parameter is initialised; materialize() computes them one
// at a time, and this rank keeps its shard. Values are bit by bit those of a model that
// was built at once.
//
//   ./deferred_init                                           # one process
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost ./deferred_init & done; wait
//   torchrun --nproc-per-node 4 --no-python ./deferred_init   # or another launcher
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

// What this rank holds of the model's parameters.
int64_t elements_held(const Classifier& model) {
  int64_t held = 0;
  for (const auto& parameter : model->parameters())
    if (!parameter.is_meta()) held += fsdp::DTensor(parameter).to_local().numel();
  return held;
}

int main() {
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::launch_environment().world_size});

  torch::manual_seed(1);  // every rank starts with the same weights
  auto model = fsdp::deferred_init([] { return Classifier(16, 32, 10); });
  // What initialises it further comes here: model->apply(init_weights).
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
  fsdp::fully_shard(model, mesh);
  const auto held_before = elements_held(model);
  fsdp::materialize(*model);  // or, for weights of a file, then: fsdp::load({.model = model}, path)
  std::printf("rank %d holds %d elements, before materialize() %d\n", int(mesh.rank()),
              int(elements_held(model)), int(held_before));
  torch::optim::AdamW optimizer(model->parameters(), /*lr=*/3e-3);

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
