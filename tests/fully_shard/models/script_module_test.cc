// TorchScript modules that a model adopts train sharded as they do unsharded.
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using torch::Tensor;

torch::jit::Module script_layer(const std::string& name, int64_t in, int64_t out) {
  torch::jit::Module layer(name);
  layer.register_parameter(
      "weight", torch::linspace(-1, 1, in * out).view({out, in}).set_requires_grad(true), false);
  layer.register_parameter("bias", torch::zeros({out}).set_requires_grad(true), false);
  layer.register_buffer("scale", torch::full({out}, 0.5));
  layer.define(R"(
    def forward(self, x):
        return torch.tanh(torch.matmul(x, self.weight.t()) + self.bias) * self.scale
  )");
  return layer;
}

torch::jit::Module script_backbone() {
  torch::jit::Module backbone("Backbone");
  backbone.register_module("first", script_layer("First", 4, 5));
  backbone.register_module("second", script_layer("Second", 5, 3));
  backbone.define(R"(
    def forward(self, x):
        return self.second.forward(self.first.forward(x))
  )");
  return backbone;
}

// A LibTorch model around a TorchScript one.
struct ScriptedImpl : torch::nn::Module {
  ScriptedImpl() {
    registry = register_module("backbone", adopt(backbone));
    torch::nn::init::constant_(head->weight, 0.25);
    torch::nn::init::zeros_(head->bias);
  }
  Tensor forward(const Tensor& x) { return head(backbone.forward({x}).toTensor()); }

  torch::jit::Module backbone = script_backbone();
  std::shared_ptr<torch::nn::Module> registry;
  torch::nn::Linear head = register_module("head", torch::nn::Linear(3, 2));
};
TORCH_MODULE(Scripted);

void train_a_step(Scripted& model, torch::optim::Optimizer& optimizer, const Tensor& x) {
  optimizer.zero_grad();
  model->forward(x).pow(2).mean().backward();
  optimizer.step();
}

class ScriptModules : public Worlds {};

TEST_P(ScriptModules, ThatAreAdoptedTrainShardedAsTheyDoUnsharded) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    Scripted plain, model;
    fully_shard(model->registry, mesh);
    fully_shard(model, mesh);
    torch::optim::SGD of_plain(plain->parameters(), 0.1), of_model(model->parameters(), 0.1);
    const auto x = torch::linspace(-2, 2, 12).view({3, 4});  // alike on all ranks
    for (int step = 0; step < 3; ++step) {
      train_a_step(plain, of_plain, x);
      train_a_step(model, of_model, x);
    }
    const auto expected = plain->named_parameters();
    EXPECT_TRUE(expected.contains("backbone.first.weight"));
    for (const auto& item : model->named_parameters()) {
      ASSERT_TRUE(is_dtensor(item.value())) << item.key();
      EXPECT_TRUE(torch::allclose(DTensor(item.value()).full_tensor(), expected[item.key()]))
          << item.key();
    }
    EXPECT_TRUE(model->named_buffers().contains("backbone.second.scale"));
  });
}

INSTANTIATE_WORLDS(ScriptModules, 1, 2, 3);

TEST(ScriptModule, WithoutTensorsIsRefusedByName) {
  torch::jit::Module empty("Frozen");
  expect_error<c10::ValueError>([&] { adopt(empty); }, ::testing::HasSubstr("Frozen"));
}

}  // namespace
}  // namespace fsdp::testing
