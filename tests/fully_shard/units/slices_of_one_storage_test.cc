// Parameters that are slices of one storage: disjoint ones are copied apart, overlapping
// ones are refused.
#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/pair.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// What a loader does that reads one file of weights: every parameter and buffer becomes a
// slice of it. (cuDNN leaves the weights of an RNN so.)
void slice_one_storage(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> tensors = module.parameters();
  for (const auto& buffer : module.buffers()) {
    if (buffer.is_floating_point()) tensors.push_back(buffer);
  }
  std::vector<torch::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  const auto whole = torch::cat(flat);
  int64_t offset = 0;
  for (auto& tensor : tensors) {
    tensor.set_data(whole.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

class SlicesOfOneStorage : public Worlds {};

template <class Module, class Run>
void expect_trains_as_unsharded(const DeviceMesh& mesh, const Module& plain, Module sliced,
                                const Run& run) {
  slice_one_storage(*sliced);
  fully_shard(sliced, mesh);
  EXPECT_TRUE(run(sliced).equal(run(plain)));
  run(sliced).sum().backward();
  run(plain).sum().backward();
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(full_gradient(sliced->parameters()[i]).allclose(plain->parameters()[i].grad()));
  }
  torch::optim::SGD(sliced->parameters(), 0.1).step();
  torch::optim::SGD(plain->parameters(), 0.1).step();
  EXPECT_TRUE(run(sliced).allclose(run(plain)));
}

TEST_P(SlicesOfOneStorage, OfARecurrentNetworkTrainAsUnsharded) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto build = [] {
      torch::nn::LSTM lstm(torch::nn::LSTMOptions(3, 4).num_layers(2).bidirectional(true));
      set_start_values(*lstm);
      return lstm;
    };
    expect_trains_as_unsharded(mesh, build(), build(), [](torch::nn::LSTM lstm) {
      return std::get<0>(lstm(torch::ones({5, 2, 3})));
    });
  });
}

// Running statistics stay where they are, beside what was copied away.
TEST_P(SlicesOfOneStorage, WithBuffersBetweenThemTrainAsUnsharded) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto build = [] {
      torch::nn::Sequential net(torch::nn::Conv2d(2, 4, 3), torch::nn::BatchNorm2d(4),
                                torch::nn::Conv2d(4, 2, 1));
      set_start_values(*net);
      return net;
    };
    expect_trains_as_unsharded(mesh, build(), build(), [](torch::nn::Sequential net) {
      return net->forward(torch::arange(98).to(torch::kFloat).reshape({1, 2, 7, 7}));
    });
  });
}

TEST_P(SlicesOfOneStorage, ThatAreViewsOfABaseNobodyElseHas) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto shared = std::make_shared<torch::nn::Module>();
    {
      const auto flat = torch::arange(12).to(torch::kFloat);
      shared->register_parameter("a", flat.slice(0, 0, 8).view({4, 2}));
      shared->register_parameter("b", flat.slice(0, 8, 12));
    }
    fully_shard(*shared, mesh);
    EXPECT_TRUE(
        full_value(shared->parameters()[0]).equal(torch::arange(8).to(torch::kFloat).view({4, 2})));
    EXPECT_TRUE(full_value(shared->parameters()[1]).equal(torch::arange(8, 12).to(torch::kFloat)));
  });
}

INSTANTIATE_WORLDS(SlicesOfOneStorage, 1, 2);

TEST(OverlappingSlices, AreRefusedWithBothNames) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    const auto whole = torch::ones({30});
    model->first->weight.set_data(whole.slice(0, 0, 16).view({4, 4}));
    model->second->weight.set_data(whole.slice(0, 14, 30).view({4, 4}));
    EXPECT_THAT(message_of([&] { fully_shard(model, mesh); }),
                AllOf(HasSubstr("'first.weight'"), HasSubstr("'second.weight'"),
                      HasSubstr("share memory")));
  });
}

// Whether what has the rest of the storage has a part of this, too, can not be seen.
TEST(SlicesBeyondTheModule, AreRefusedWithTheWayOut) {
  on_one_rank([](const DeviceMesh& mesh) {
    Pair model;
    slice_one_storage(*model);
    EXPECT_THAT(message_of([&] { fully_shard(model->first, mesh); }),
                AllOf(HasSubstr("'weight'"), HasSubstr("outside of this module"),
                      HasSubstr("parameter.set_data(parameter.clone())")));
    for (auto& parameter : model->parameters()) parameter.set_data(parameter.clone());
    fully_shard(model->first, mesh);
    fully_shard(model, mesh);
  });
}

}  // namespace
}  // namespace fsdp::testing
