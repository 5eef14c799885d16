// Muon for the matrices of hidden layers, AdamW for the rest, in one optimizer. Each
// matrix is orthogonalized on one rank, however it is sharded.
//
//   ./muon                                           # one process
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost ./muon & done; wait
//   torchrun --nproc-per-node 4 --no-python ./muon   # or another launcher
//
// The last line is the same on 1, 2, 3 and 4 ranks.
#include "fully_shard/fully_shard.h"
#include "optim/muon_with_adamw.h"

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>
#include <iostream>
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

struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl(int64_t vocabulary, int64_t width)
      : embedding(register_module("embedding", torch::nn::Embedding(vocabulary, width))),
        head(register_module("head", torch::nn::Linear(width, vocabulary))) {
    for (int i = 0; i < 2; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(width)));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding(tokens);
    for (auto& block : blocks) x = block(x);
    return head(x);
  }

  torch::nn::Embedding embedding;
  torch::nn::Linear head;
  std::vector<Block> blocks;
};
TORCH_MODULE(LanguageModel);

// Sequences that go on from any token by one rule, alike on all ranks: [sequences,
// length].
torch::Tensor make_text(int64_t sequences, int64_t length, int64_t vocabulary) {
  std::vector<torch::Tensor> columns = {torch::randint(vocabulary, {sequences})};
  while (int64_t(columns.size()) < length)
    columns.push_back((columns.back() * 5 + 3).remainder(vocabulary));
  return torch::stack(columns, 1);
}

int main() {
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::launch_environment().world_size});

  torch::manual_seed(1);  // every rank starts with the same weights
  LanguageModel model(/*vocabulary=*/32, /*width=*/32);
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
  fsdp::fully_shard(model, mesh);

  // Embeddings, norms and biases are for AdamW by themselves; the head must be named,
  // since it looks like any other matrix.
  const auto split = fsdp::split_for_muon(*model, {.others = {"head.*"}});
  if (fsdp::is_rank_zero()) std::cout << split << std::flush;
  fsdp::MuonWithAdamW optimizer(split, fsdp::MuonOptions(/*lr=*/2e-2),
                                torch::optim::AdamWOptions(/*lr=*/3e-3));

  const auto text = make_text(24, 17, 32).chunk(mesh.size())[mesh.rank()];  // this rank's part
  const auto inputs = text.slice(1, 0, 16), targets = text.slice(1, 1).flatten();

  double first = 0, last = 0;
  for (int step = 1; step <= 28; ++step) {
    const auto logits = model->forward(inputs).flatten(0, 1);
    auto loss = torch::nn::functional::cross_entropy(logits, targets);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = fsdp::all_reduce(loss.item<double>(), mesh, fsdp::Reduce::kMean);
    if (step == 1) first = last;
    if (step % 4 == 0 && fsdp::is_rank_zero()) std::printf("step %d: loss %.3f\n", step, last);
  }
  if (fsdp::is_rank_zero()) std::printf("loss %.3f -> %.3f\n", first, last);
  fsdp::destroy_process_group();
}
