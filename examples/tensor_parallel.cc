// Tensor parallelism within pairs of ranks, sharded over the pairs: each rank of a pair
// computes half of every layer. The model's code stays as it is on one device; a plan
// says how the layers are cut.
//
//   ./tensor_parallel                                           # one process: nothing is cut
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1 2 3; do
//     RANK=$r WORLD_SIZE=4 MASTER_ADDR=localhost ./tensor_parallel &
//   done; wait
//   torchrun --nproc-per-node 4 --no-python ./tensor_parallel   # or another launcher
//
// It takes 1 rank, 2 (one pair) or 4, and the last line is the same on each.
#include "fully_shard/fully_shard.h"
#include "tensor_parallel/parallelize_module.h"

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>
#include <string>
#include <vector>

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t heads)
      : norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        query(register_module("query", torch::nn::Linear(width, width))),
        key(register_module("key", torch::nn::Linear(width, width))),
        value(register_module("value", torch::nn::Linear(width, width))),
        output(register_module("output", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))),
        heads(heads) {}
  torch::Tensor forward(torch::Tensor x) {
    const auto y = norm1(x);
    const auto attended = torch::scaled_dot_product_attention(
        split(query(y)), split(key(y)), split(value(y)), {}, /*dropout_p=*/0, /*is_causal=*/true);
    x = x + output(attended.transpose(1, 2).reshape(x.sizes()));
    return x + down(torch::gelu(up(norm2(x))));
  }
  torch::Tensor split(const torch::Tensor& x) {  // all heads, wherever they are
    return x.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
  }

  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear query, key, value, output, up, down;
  int64_t heads;
};
TORCH_MODULE(Block);

struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl(int64_t vocabulary, int64_t width, int64_t heads)
      : embedding(register_module("embedding", torch::nn::Embedding(vocabulary, width))),
        head(register_module("head", torch::nn::Linear(width, vocabulary))) {
    for (int i = 0; i < 2; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(width, heads)));
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
  const int64_t vocabulary = 32, width = 32, heads = 4, head_width = width / heads;
  const int64_t ranks = fsdp::launch_environment().world_size;
  const int64_t tp = ranks == 1 ? 1 : 2;
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {ranks / tp, tp}, {"dp", "tp"});

  torch::manual_seed(1);  // every rank starts with the same weights
  LanguageModel model(vocabulary, width, heads);
  fsdp::parallelize_module(model, mesh["tp"],
                           {{"embedding", fsdp::RowwiseParallel{}},
                            {"block*.query", fsdp::ColwiseParallel{.unit = head_width}},
                            {"block*.key", fsdp::ColwiseParallel{.unit = head_width}},
                            {"block*.value", fsdp::ColwiseParallel{.unit = head_width}},
                            {"block*.output", fsdp::RowwiseParallel{.unit = head_width}},
                            {"block*.up", fsdp::ColwiseParallel{}},
                            {"block*.down", fsdp::RowwiseParallel{}},
                            {"head", fsdp::ColwiseParallel{}}});
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh["dp"]);
  fsdp::fully_shard(model, mesh["dp"]);
  torch::optim::AdamW optimizer(model->parameters(), /*lr=*/3e-3);  // after both

  // Ranks of a pair see the same sequences, each pair its part of them.
  const auto pair = mesh.local_rank(0);
  const auto text = make_text(24, 17, vocabulary).chunk(mesh.size(0))[pair];
  const auto inputs = text.slice(1, 0, 16), targets = text.slice(1, 1).flatten();

  double first = 0, last = 0;
  for (int step = 1; step <= 24; ++step) {
    const auto logits = model->forward(inputs).flatten(0, 1);  // cut over the vocabulary
    auto loss = torch::nn::functional::cross_entropy(logits, targets);
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
