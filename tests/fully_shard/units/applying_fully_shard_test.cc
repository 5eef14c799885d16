// Where and when fully_shard is applied: in any mode, in any order of units, to tied and
// trained models, before and after evaluations.
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using torch::Tensor;

class Application : public Worlds {};

Model small_decoder() { return decoder_model(8, 2); }

TEST_P(Application, UnderNoGradAndInInferenceModeIsTheSame) {
  expect_parity(
      world(), small_decoder,
      [](torch::nn::Module& module, const DeviceMesh& mesh) {
        torch::NoGradGuard no_grad;
        shard_decoder(module, mesh);
      },
      "under no_grad");
  expect_parity(
      world(), small_decoder,
      [](torch::nn::Module& module, const DeviceMesh& mesh) {
        c10::InferenceMode inference;
        shard_decoder(module, mesh);
      },
      "in inference mode");
}

TEST_P(Application, ToSiblingsInAnyOrderIsTheSame) {
  const auto reversed = [](torch::nn::Module& module, const DeviceMesh& mesh) {
    auto children = module.children();
    std::reverse(children.begin(), children.end());
    for (const auto& child : children) fully_shard(*child, mesh);
    fully_shard(module, mesh);
  };
  expect_parity(world(), small_decoder, reversed, "the last child first");
}

// The same weight under three names, each in a unit of its own.
struct TiedImpl : torch::nn::Module {
  struct Holder : torch::nn::Module {
    explicit Holder(const Tensor& shared) : weight(register_parameter("weight", shared)) {}
    Tensor weight;
  };
  TiedImpl() {
    const auto shared = torch::randn({6, 16}).set_requires_grad(true);
    for (const char* name : {"a", "b", "c"})
      holders.push_back(register_module(name, std::make_shared<Holder>(shared)));
  }
  Tensor forward(const Tensor& x) {
    const auto y = torch::tanh(torch::linear(x, holders[0]->weight));
    return torch::linear(torch::linear(y, holders[1]->weight.t()), holders[2]->weight);
  }
  std::vector<std::shared_ptr<Holder>> holders;
};
TORCH_MODULE(Tied);

TEST_P(Application, ToUnitsThatShareAParameterTiesThemInAnyOrder) {
  const auto build = []() -> Model {
    Tied model;
    return {model.ptr(), [model](const Data& data) mutable { return model(data.x).pow(2).sum(); }};
  };
  std::vector<size_t> order = {0, 1, 2};
  do {
    const auto shard = [&](torch::nn::Module& module, const DeviceMesh& mesh) {
      for (const auto i : order) fully_shard(*module.children()[i], mesh);
      fully_shard(module, mesh);
      EXPECT_TRUE(module.parameters()[0].is_same(module.parameters()[2]));
    };
    expect_parity(world(), build, shard, c10::str("order ", order[0], order[1], order[2]));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_P(Application, ToATrainedModelGoesOnFromItsWeights) {
  const auto build = [] {
    auto model = small_decoder();
    torch::optim::SGD optimizer(model.module->parameters(), 0.1);
    model.loss(make_data(1)).backward();
    optimizer.step();
    optimizer.zero_grad();
    return model;
  };
  expect_parity(world(), build, shard_decoder, "a trained model");
}

// What stands below a trained root is put under a new one.
TEST_P(Application, AboveATrainedRootMakesOneTree) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto inner = torch::nn::Sequential(make_linear(4, 4), make_linear(4, 4));
    for (const auto& layer : inner->children()) fully_shard(*layer, mesh);
    fully_shard(inner, mesh);
    inner->forward(torch::ones({1, 4})).sum().backward();
    struct Outer : torch::nn::Module {
      explicit Outer(torch::nn::Sequential below)
          : inner(register_module("inner", std::move(below))) {}
      Tensor forward(const Tensor& x) { return last(inner->forward(x)); }
      torch::nn::Sequential inner;
      torch::nn::Linear last = register_module("last", make_linear(4, 4));
    };
    const auto outer = std::make_shared<Outer>(inner);
    const auto root = fully_shard(outer, mesh);
    EXPECT_TRUE(root.is_root());
    EXPECT_FALSE(get_fsdp_module(*inner).is_root());
    EXPECT_EQ(fsdp_modules(*outer).size(), 4u);
    outer->zero_grad();
    const auto before = counters(mesh).reduce_scatters;
    outer->forward(torch::ones({1, 4})).sum().backward();
    EXPECT_EQ(counters(mesh).reduce_scatters - before, mesh.size() == 1 ? 0 : 3);
    EXPECT_TRUE(torch::equal(full_gradient(outer->last->parameters()[1]), torch::ones({4})));
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

// An exception between two backwards without synchronisation takes its own gradients
// along, and no others.
TEST_P(Application, AFailedBackwardBetweenUnsynchronisedOnesLeavesNothingHalf) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded(small_decoder), sharded = build_seeded(small_decoder);
    shard_decoder(*sharded.module, mesh);
    auto& decoder = dynamic_cast<DecoderImpl&>(*sharded.module);
    const auto mine = make_data(407 + static_cast<uint64_t>(rank));
    {
      const NoSyncGuard no_sync(get_fsdp_module(*sharded.module));
      sharded.loss(mine).backward();
      auto x = decoder.embedding(mine.index);
      for (auto& block : decoder.blocks) x = block(x);
      x.register_hook([](const Tensor&) { throw std::runtime_error("in backward"); });
      EXPECT_THROW(decoder.head(decoder.norm(x)).sum().backward(), std::exception);
    }
    get_fsdp_module(*sharded.module).zero_pending_gradients();
    sharded.module->zero_grad();
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    const auto expected = expected_gradients(plain, mesh.size(), 4);
    sharded.loss(mine).backward();
    expect_gradients(*sharded.module, expected, mesh.size(), "after the failure");
  });
}

INSTANTIATE_WORLDS(Application, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
