// Optimizers of one's own. What works element by element, such as Lion here, is written
// as for plain tensors: parameters, gradients and states are DTensors, and each rank
// steps its shards. What needs whole matrices, such as Shampoo, is written with
// fsdp::OwnedStep (shampoo.h; adam_8bit.h is another one).
//
//   ./own_optimizer                                           # one process
//   export OMP_NUM_THREADS=1   # a thread per rank; torchrun sets it by itself
//   for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=localhost ./own_optimizer & done; wait
//   torchrun --nproc-per-node 4 --no-python ./own_optimizer   # or another launcher
//
// The last line is the same on 1, 2, 3 and 4 ranks.
#include "fully_shard/fully_shard.h"
#include "optim/split_for_muon.h"
#include "shampoo.h"

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), without
// decay. It borrows SGD's options, for lr, and SGD's state, for its momentum.
class Lion : public torch::optim::Optimizer {
 public:
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;

  Lion(std::vector<torch::Tensor> params, Options options)
      : Optimizer(std::move(params), std::make_unique<Options>(options)) {}

  torch::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : param_groups_[0].params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = state_[parameter.unsafeGetTensorImpl()];
      if (!state) {
        auto fresh = std::make_unique<State>();
        fresh->momentum_buffer(torch::zeros_like(parameter));
        state = std::move(fresh);
      }
      auto& momentum = static_cast<State&>(*state).momentum_buffer();
      const auto direction = momentum.lerp(parameter.grad(), 0.1).sign_();
      parameter.add_(direction, -param_groups_[0].options().get_lr());
      momentum.lerp_(parameter.grad(), 0.01);
    }
    return {};
  }
  // So that checkpoints have the state.
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
};

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
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {fsdp::launch_environment().world_size});

  torch::manual_seed(1);  // every rank starts with the same weights
  Classifier model(16, 32, 10);
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
  fsdp::fully_shard(model, mesh);
  const auto split = fsdp::split_for_muon(*model);  // parameters of two dimensions, and others
  examples::Shampoo shampoo(split.matrices(), /*lr=*/{3e-2});
  Lion lion(split.others(), /*lr=*/3e-3);

  // A batch that all ranks make alike, and of it the part of this rank.
  const auto inputs = torch::randn({96, 16}).chunk(mesh.size())[mesh.rank()];
  const auto targets = torch::randint(10, {96}).chunk(mesh.size())[mesh.rank()];

  double first = 0, last = 0;
  for (int step = 1; step <= 40; ++step) {
    auto loss = torch::nn::functional::cross_entropy(model->forward(inputs), targets);
    loss.backward();
    shampoo.step();
    lion.step();
    model->zero_grad();
    last = fsdp::all_reduce(loss.item<double>(), mesh, fsdp::Reduce::kMean);
    if (step == 1) first = last;
    if (step % 10 == 0 && fsdp::is_rank_zero()) std::printf("step %d: loss %.3f\n", step, last);
  }
  if (fsdp::is_rank_zero()) std::printf("loss %.3f -> %.3f\n", first, last);
  fsdp::destroy_process_group();
}
