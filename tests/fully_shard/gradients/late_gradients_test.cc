// Gradients that arrive after their group's reduction has left, on some ranks only.
#include "tests/fully_shard/support/parity.h"
#include "tests/support/late_use.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

class LateGradients : public Worlds {
 protected:
  // In one order on all ranks, whatever each has.
  void expect_reduced() const {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4),
                                  torch::nn::Linear(4, 4));
      {
        torch::NoGradGuard no_grad;
        for (auto& parameter : model->parameters()) parameter.fill_(0.5);
      }
      auto last = model->ptr<torch::nn::LinearImpl>(2);
      for (const auto& layer : model->children()) fully_shard(*layer, mesh);
      const auto run = [&](bool late_somewhere) {
        for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
        const auto x = torch::ones({1, 4}, torch::requires_grad());
        auto y = late_use(
            x, [last] { return (last->weight * 3).sum(); }, late_somewhere && rank == 0);
        const auto before = counters(mesh).late_reduce_scatters;
        model->forward(y).sum().backward();
        const int64_t late = counters(mesh).late_reduce_scatters - before;
        EXPECT_EQ(late, late_somewhere && world() > 1 ? 3 : 0);
        return DTensor(last->parameters()[0].grad()).full_tensor();
      };
      const auto usual = run(false), with_late = run(true);
      EXPECT_TRUE(torch::allclose(with_late, usual + 3.0 / static_cast<double>(world())))
          << with_late;
      EXPECT_TRUE(torch::equal(run(false), usual));
    });
  }
};

TEST_P(LateGradients, OfOneRankMakeAllReduceEveryUnitOnceMore) { expect_reduced(); }

TEST_P(LateGradients, OfOneRankMakeAllReduceEveryUnitOnceMoreOverGloo) {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");
  expect_reduced();
}

// The unit whose reduction leaves last tells of late gradients, here only those of its
// replica: the other one has to send once more all the same.
TEST(HybridLateGradients, OfOneRankAreReducedOnAllThoughTheLastUnitStaysInItsReplica) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
    torch::nn::Linear first(4, 4), last(4, 4);
    {
      torch::NoGradGuard no_grad;
      for (auto* layer : {&first, &last}) {
        for (auto& parameter : (*layer)->parameters()) parameter.fill_(0.5);
      }
    }
    fully_shard(first, mesh).set_requires_all_reduce(false);
    fully_shard(last, mesh);
    const auto run = [&](bool late) {
      for (auto& parameter : last->parameters()) parameter.mutable_grad().reset();
      const auto x = torch::ones({1, 4}, torch::requires_grad());
      const auto y = late_use(
          x, [last] { return (last->weight * 3).sum(); }, late);
      last(first(y)).sum().backward();
      return DTensor(last->parameters()[0].grad()).full_tensor();
    };
    const auto usual = run(false), with_late = run(rank == 0);
    EXPECT_TRUE(torch::allclose(with_late, usual + 3.0 / 4)) << with_late;
  });
}

TEST_P(LateGradients, AParameterThatOnlyOneRankDifferentiatesHasAGradientOnAll) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    torch::nn::Linear first(torch::nn::LinearOptions(4, 4).bias(false)),
        second(torch::nn::LinearOptions(4, 4).bias(false));
    {
      torch::NoGradGuard no_grad;
      first->weight.fill_(0.5);
      second->weight.fill_(0.25);
    }
    fully_shard(first, mesh);
    fully_shard(second, mesh);
    const auto weight = rank == 0 ? second->weight : second->weight.detach();
    torch::linear(first(torch::ones({1, 4})), weight).sum().backward();
    const auto gradient = DTensor(second->parameters()[0].grad()).full_tensor();
    EXPECT_TRUE(torch::allclose(gradient, torch::full({4, 4}, 2.0 / static_cast<double>(world()))))
        << gradient;
  });
}

INSTANTIATE_WORLDS(LateGradients, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
