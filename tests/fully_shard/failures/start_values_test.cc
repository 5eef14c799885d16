// Ranks that start with different parameters are told, by name, at the first gather.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class StartValues : public Worlds {};

struct TwoLayers : torch::nn::Module {
  explicit TwoLayers(double weight, double bias = 0.25) {
    torch::NoGradGuard no_grad;
    layer->weight.fill_(weight);
    layer->bias.fill_(bias);
    other->weight.fill_(0.5);
    other->bias.fill_(0.5);
  }
  torch::Tensor forward(const torch::Tensor& x) { return other(layer(x)); }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(6, 6));
  torch::nn::Linear other = register_module("other", torch::nn::Linear(6, 6));
};

std::shared_ptr<TwoLayers> sharded(std::shared_ptr<TwoLayers> model, const DeviceMesh& mesh) {
  fully_shard(model->layer, mesh);
  fully_shard(model->other, mesh);
  fully_shard(model, mesh);
  return model;
}

// On this rank only.
double odd_one(int64_t rank, const DeviceMesh& mesh) { return rank == mesh.size() - 1 ? 1 : 2; }

TEST_P(StartValues, ThatDifferAreNamedOnEveryRankAtTheFirstGather) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto model = sharded(std::make_shared<TwoLayers>(odd_one(rank, mesh)), mesh);
    EXPECT_THAT(message_of([&] {
                  model->forward(torch::ones({1, 6}));
                }),
                AllOf(HasSubstr("'layer.weight'"), Not(HasSubstr("'layer.bias'"))));
  });
}

TEST_P(StartValues, ThatDifferInOneElementAreFoundInFp64AndInBias) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = std::make_shared<TwoLayers>(1.0);
    model->to(torch::kDouble);
    if (rank == 0) {
      torch::NoGradGuard no_grad;
      model->layer->bias[5] += 1e-15;
    }
    sharded(model, mesh);
    EXPECT_THAT(message_of([&] {
                  model->forward(torch::ones({1, 6}, torch::kDouble));
                }),
                HasSubstr("'layer.bias'"));
  });
}

TEST_P(StartValues, ThatAgreeAreNotCompared) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto model = sharded(std::make_shared<TwoLayers>(1.0), mesh);
    model->forward(torch::ones({1, 6})).sum().backward();
    EXPECT_EQ(counters(mesh).all_gathers, 2);  // each layer once: x needs no gradient
  });
}

TEST_P(StartValues, AWriteToTheEntryBeforeTheFirstGatherEndsTheComparison) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto model = sharded(std::make_shared<TwoLayers>(odd_one(rank, mesh)), mesh);
    {
      torch::NoGradGuard no_grad;
      model->layer->parameters()[0].fill_(0.75);
    }
    EXPECT_NO_THROW(model->forward(torch::ones({1, 6})));
    EXPECT_TRUE(torch::equal(full_value(model->layer->parameters()[0]), torch::full({6, 6}, 0.75)));
  });
}

TEST_P(StartValues, AWriteToOneParameterLeavesTheOthersCompared) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto model =
        sharded(std::make_shared<TwoLayers>(odd_one(rank, mesh), odd_one(rank, mesh)), mesh);
    {
      torch::NoGradGuard no_grad;
      model->layer->parameters()[0].fill_(0.75);
    }
    EXPECT_THAT(message_of([&] {
                  model->forward(torch::ones({1, 6}));
                }),
                AllOf(HasSubstr("'layer.bias'"), Not(HasSubstr("'layer.weight'"))));
  });
}

TEST_P(StartValues, AWriteOfTheMemberBeforeTheFirstGatherEndsTheComparison) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto model = sharded(std::make_shared<TwoLayers>(odd_one(rank, mesh)), mesh);
    {
      torch::NoGradGuard no_grad;
      EXPECT_NO_THROW(torch::nn::init::constant_(model->layer->weight, 0.75));
    }
    EXPECT_NO_THROW(model->forward(torch::ones({1, 6})));
  });
}

TEST_P(StartValues, ShapesThatDifferAreNamedThoughTheChunksAreEqual) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const int64_t rows = 4 * world();
    torch::nn::Linear layer(7, rank == 0 ? rows : rows - 1);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : layer->parameters()) parameter.fill_(0.5);
    }
    fully_shard(layer, mesh);
    EXPECT_THAT(message_of([&] { layer(torch::ones({1, 7})); }), HasSubstr("weight"));
  });
}

TEST_P(StartValues, DtypesThatDifferAreNamedThoughTheBytesAreEqual) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    torch::nn::Linear layer(6, 6);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : layer->parameters()) parameter.zero_();
    }
    const auto dtype = rank == 0 ? torch::kHalf : torch::kBFloat16;
    layer->to(dtype);
    fully_shard(layer, mesh);
    EXPECT_THAT(message_of([&] {
                  layer(torch::ones({1, 6}, dtype));
                }),
                AllOf(HasSubstr("'weight'"), HasSubstr("dtype")));
  });
}

INSTANTIATE_WORLDS(StartValues, 2, 3);

}  // namespace
}  // namespace fsdp::testing
