// What is refused beyond error_messages_test.cc, and that a refusal leaves everything
// usable.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

class Refusals : public Worlds {};

void expect_trains(Linear& layer) {
  layer->zero_grad();
  layer(torch::ones({1, 4})).sum().backward();
  EXPECT_TRUE(torch::equal(full_gradient(layer->parameters()[0]), torch::ones({4, 4})));
}

TEST_P(Refusals, APlacementFunctionThatThrowsOrGivesNonsenseLeavesTheModuleGood) {
  on_ranks([](const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    const auto with = [&](auto function) {
      return message_of(
          [&] { fully_shard(layer, mesh, {.shard_placement_fn = std::move(function)}); });
    };
    EXPECT_THAT(with([](const std::string& name, const at::Tensor&) -> std::optional<Shard> {
                  if (name == "bias") throw std::runtime_error("the user's own");
                  return std::nullopt;
                }),
                HasSubstr("the user's own"));
    EXPECT_THAT(with([](const std::string&, const at::Tensor&) { return Shard{2}; }),
                AllOf(HasSubstr("Shard(2)"), HasSubstr("'weight'")));
    EXPECT_FALSE(is_fsdp_module(*layer));
    for (const auto& parameter : layer->parameters()) EXPECT_FALSE(is_dtensor(parameter));
    fully_shard(layer, mesh, {.shard_placement_fn = [](const std::string&, const at::Tensor&) {
                  return Shard{0};
                }});
    expect_trains(layer);
  });
}

TEST_P(Refusals, AnInitialiserOverASummonedModelSaysThatItIsSummoned) {
  on_ranks([](const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    {
      const SummonFullParams full(layer);
      expect_error<c10::ValueError>([&] { apply_unsharded(*layer, [](torch::nn::Module&) {}); },
                                    HasSubstr("summoned already"));
    }
    expect_trains(layer);
  });
}

TEST_P(Refusals, AFileOfAnotherModelIsRefusedAndTheValuesStay) {
  std::stringstream file;
  torch::save(make_linear(3, 5), file);
  const auto bytes = file.str();
  on_ranks([&](const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    const auto before = full_value(layer->parameters()[0]);
    std::stringstream mine(bytes);
    EXPECT_THAT(message_of([&] { torch::load(layer, mine); }),
                AllOf(HasSubstr("[5, 3]"), HasSubstr("[4, 4]")));
    EXPECT_TRUE(torch::equal(full_value(layer->parameters()[0]), before));
    expect_trains(layer);
  });
}

TEST_P(Refusals, SavingAnOptimizerThePlainWaySaysWhatToDo) {
  on_ranks([](const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    torch::optim::AdamW optimizer(layer->parameters(), 0.1);
    layer(torch::ones({1, 4})).sum().backward();
    optimizer.step();
    std::stringstream file;
    EXPECT_THAT(message_of([&] { torch::save(optimizer, file); }),
                AllOf(HasSubstr("optimizer"), HasSubstr("fsdp::save")));
    expect_trains(layer);
    EXPECT_NO_THROW(optimizer.step());
  });
}

// Its states are plain and whole, of which a step takes this rank's part.
TEST_P(Refusals, AnOptimizerLoadedThePlainWayStepsOnAsThePlainOne) {
  std::stringstream file;
  auto plain = make_linear(4, 4);
  torch::optim::AdamW plain_optimizer(plain->parameters(), 0.1);
  const auto step = [](torch::nn::Linear& layer, torch::optim::AdamW& optimizer) {
    optimizer.zero_grad();
    layer(torch::ones({1, 4})).sum().backward();
    optimizer.step();
  };
  step(plain, plain_optimizer);
  torch::save(plain_optimizer, file);
  const auto weight = plain->weight.detach().clone(), bias = plain->bias.detach().clone();
  step(plain, plain_optimizer);
  const auto bytes = file.str();
  on_ranks([&](const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    torch::optim::AdamW optimizer(layer->parameters(), 0.1);
    {
      torch::NoGradGuard no_grad;
      layer->parameters()[0].copy_(weight);
      layer->parameters()[1].copy_(bias);
    }
    std::stringstream mine(bytes);
    torch::load(optimizer, mine);
    step(layer, optimizer);
    const auto entry = layer->parameters()[0].detach();
    EXPECT_TRUE(torch::allclose(DTensor(entry).full_tensor(), plain->weight));
  });
}

TEST_P(Refusals, LibTorchsClippingOverTwoMeshesNamesOurs) {
  on_ranks([](const DeviceMesh& mesh) {
    const auto other = init_device_mesh(torch::kCPU, {1, mesh.size()}, {"none", "all"})["all"];
    auto a = make_linear(4, 4), b = make_linear(4, 4);
    fully_shard(a, mesh);
    fully_shard(b, other);
    b(a(torch::ones({1, 4}))).sum().backward();
    std::vector<torch::Tensor> both = a->parameters();
    for (const auto& parameter : b->parameters()) both.push_back(parameter);
    EXPECT_THAT(message_of([&] { torch::nn::utils::clip_grad_norm_(both, 1.0); }),
                HasSubstr("fsdp::clip_grad_norm_"));
    EXPECT_GT(clip_grad_norm_(both, 1.0).item<double>(), 0);
  });
}

INSTANTIATE_WORLDS(Refusals, 2, 3);

}  // namespace
}  // namespace fsdp::testing
