// Long sequences (context parallelism): each rank has a part of every sequence of a
// batch, and attention brings together what it needs. The model's code stays as it is on
// one device.
//
//   ./context_parallel                                           # one process: nothing is cut
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1 2 3; do
//     RANK=$r WORLD_SIZE=4 MASTER_ADDR=localhost ./context_parallel &
//   done; wait
//
// It takes 1 rank, 2 (which share each sequence) or 4 (two such pairs), and the last line
// is the same on each.
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>
#include <vector>

struct DecoderImpl : torch::nn::Module {
  DecoderImpl(int64_t vocabulary, int64_t width, int64_t length)
      : embedding(register_module("embedding", torch::nn::Embedding(vocabulary, width))),
        positions(register_module("positions", torch::nn::Embedding(length, width))),
        packed(register_module("packed", torch::nn::Linear(width, 3 * width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))),
        head(register_module("head", torch::nn::Linear(width, vocabulary))) {}
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding(tokens) + positions(torch::arange(tokens.size(1)));
    const auto parts = packed(x).chunk(3, -1);
    const auto heads = [&](const torch::Tensor& y) {
      return y.view({y.size(0), y.size(1), 4, -1}).transpose(1, 2);
    };
    const auto attended = torch::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]),
                                                              heads(parts[2]), {}, /*dropout_p=*/0,
                                                              /*is_causal=*/true);
    x = x + attended.transpose(1, 2).reshape(x.sizes());
    return head(x + down(torch::gelu(up(x))));
  }

  torch::nn::Embedding embedding, positions;
  torch::nn::Linear packed, up, down, head;
};
TORCH_MODULE(Decoder);

// Sequences that go on from any token by one rule, alike on all ranks: [sequences,
// length].
torch::Tensor make_text(int64_t sequences, int64_t length, int64_t vocabulary) {
  std::vector<torch::Tensor> columns = {torch::randint(vocabulary, {sequences})};
  while (int64_t(columns.size()) < length)
    columns.push_back((columns.back() * 5 + 3).remainder(vocabulary));
  return torch::stack(columns, 1);
}

int main() {
  const int64_t vocabulary = 32, width = 32, length = 32;
  const int64_t ranks = fsdp::launch_environment().world_size;
  const int64_t cp = ranks == 1 ? 1 : 2;
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {ranks / cp, cp}, {"dp", "cp"});

  torch::manual_seed(1);  // every rank starts with the same weights
  Decoder model(vocabulary, width, length);
  // Parameters are sharded over all ranks, and gradients reduced over them, once.
  fsdp::fully_shard(model, mesh.flatten({"dp", "cp"}, "all")["all"]);
  torch::optim::AdamW optimizer(model->parameters(), /*lr=*/3e-3);

  // Ranks that share sequences see the same ones.
  const auto text = make_text(24, length + 1, vocabulary).chunk(mesh.size(0))[mesh.local_rank(0)];
  const auto cut = [&](const torch::Tensor& tokens) {
    return fsdp::distribute_tensor(tokens, mesh["cp"], {fsdp::Shard{1}});
  };
  const auto inputs = cut(text.slice(1, 0, length)), targets = cut(text.slice(1, 1));

  double first = 0, last = 0;
  for (int step = 1; step <= 32; ++step) {
    auto loss = torch::nn::functional::cross_entropy(model->forward(inputs).flatten(0, 1),
                                                     targets.flatten());
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
