// A mixture of experts (expert parallelism): each rank has some of the experts, and
// tokens go to the ranks of theirs and come back.
//
//   ./experts                                                    # one process has all experts
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost ./experts & done; wait
//
// It takes 1, 2 or 4 ranks, and the last line is the same on each.
#include "experts/route_to_experts.h"
#include "fully_shard/fully_shard.h"
#include "tensor_parallel/parallelize_module.h"

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>

// All experts' weights in one tensor each: [experts, out, in].
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl(int64_t count, int64_t width, int64_t hidden)
      : up(register_parameter("up", torch::randn({count, hidden, width}) / 3)),
        down(register_parameter("down", torch::randn({count, width, hidden}) / 4)) {}
  torch::Tensor forward(const torch::Tensor& rows, const torch::Tensor& counts) {
    return fsdp::grouped_linear(torch::relu(fsdp::grouped_linear(rows, counts, up)), counts, down);
  }

  torch::Tensor up, down;
};
TORCH_MODULE(Experts);

struct MixtureImpl : torch::nn::Module {
  MixtureImpl(int64_t count, int64_t width, fsdp::DeviceMesh of_experts)
      : router(register_module("router", torch::nn::Linear(width, count))),
        experts(register_module("experts", Experts(count, width, 16))),
        count(count),
        mesh(std::move(of_experts)) {}
  torch::Tensor forward(const torch::Tensor& tokens) {  // [tokens, width]
    auto [weights, chosen] = router(tokens).softmax(-1).topk(2, -1);
    return fsdp::route_to_experts(
        tokens, {.experts = chosen, .weights = weights, .count = count}, mesh,
        [this](const auto& rows, const auto& counts) { return experts(rows, counts); });
  }

  torch::nn::Linear router;
  Experts experts;
  int64_t count;
  fsdp::DeviceMesh mesh;
};
TORCH_MODULE(Mixture);

int main() {
  const int64_t experts = 4, width = 8;
  const int64_t ranks = fsdp::launch_environment().world_size;
  // Pairs of ranks have all experts between them; the pairs shard what each rank has.
  const int64_t ep = ranks == 1 ? 1 : 2;
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {ranks / ep, ep}, {"efsdp", "ep"});

  torch::manual_seed(1);  // every rank starts with the same weights
  Mixture model(experts, width, mesh["ep"]);
  fsdp::parallelize_module(model, mesh["ep"], {{"experts", fsdp::ExpertParallel{}}});
  fsdp::fully_shard(model->experts, mesh["efsdp"]);
  fsdp::fully_shard(model, mesh.flatten({"efsdp", "ep"}, "dp")["dp"]);
  torch::optim::AdamW optimizer(model->parameters(), /*lr=*/1e-2);

  // Each rank has tokens of its own.
  const auto all = torch::randn({512, width});
  const auto tokens = all.chunk(mesh.size())[mesh.rank()];

  double first = 0, last = 0;
  for (int step = 1; step <= 160; ++step) {
    auto loss = (model->forward(tokens) - tokens.abs()).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = fsdp::all_reduce(loss.item<double>(), mesh, fsdp::Reduce::kMean);
    if (step == 1) first = last;
    if (step % 20 == 0 && fsdp::is_rank_zero()) std::printf("step %d: loss %.3f\n", step, last);
  }
  if (fsdp::is_rank_zero()) std::printf("loss %.3f -> %.3f\n", first, last);
  fsdp::destroy_process_group();
}
