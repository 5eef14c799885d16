// Units that are used once per step of a loop over time: what they cost, what keeps them
// gathered, and who says so.
#include "fully_shard/fully_shard.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

struct LoopImpl : torch::nn::Module {
  torch::nn::GRUCell cell = register_module("cell", torch::nn::GRUCell(3, 4));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 3));

  LoopImpl() { set_start_values(*this); }
  Tensor forward(int64_t steps) {
    auto hidden = torch::zeros({2, 4}), x = torch::ones({2, 3});
    for (int64_t step = 0; step < steps; ++step) {
      hidden = cell(x, hidden);
      x = head(hidden);
    }
    return x.pow(2).sum();
  }
};
TORCH_MODULE(Loop);

Loop sharded_loop(const DeviceMesh& mesh, const FullyShardOptions& options = {}) {
  Loop model;
  fully_shard(model->cell, mesh, options);
  fully_shard(model->head, mesh, options);
  fully_shard(model, mesh, options);
  return model;
}

int64_t gathers_of_step(Loop& model, const DeviceMesh& mesh, int64_t steps) {
  const auto before = counters(mesh).all_gathers;
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  optimizer.zero_grad();
  model(steps).backward();
  optimizer.step();
  return counters(mesh).all_gathers - before;
}

class TimeLoops : public Worlds {};

TEST_P(TimeLoops, GatherAgainInEveryRoundAndAreNamedWithTheRecipe) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded_loop(mesh);
    EXPECT_THAT(describe_units(*model), Not(HasSubstr("times")));
    EXPECT_GT(gathers_of_step(model, mesh, 12), 24);
    EXPECT_THAT(describe_units(*model), AllOf(HasSubstr(" times between two ends of a backward"),
                                              HasSubstr("reshard_after_forward = false"),
                                              HasSubstr("set_reshard_after_backward(false)")));
  });
}

TEST_P(TimeLoops, OfKeptUnitsGatherOncePerStepWhateverTheirLength) {
  on_ranks([this](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded_loop(mesh, {.reshard_after_forward = false});
    get_fsdp_module(*model).set_reshard_after_backward(false);
    Loop plain;
    torch::optim::SGD optimizer(plain->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(gathers_of_step(model, mesh, 9 + rank), 2);
      optimizer.zero_grad();
      for (int64_t other = 0; other < world(); ++other)
        (plain(9 + other) / static_cast<double>(world())).backward();
      optimizer.step();
    }
    EXPECT_THAT(describe_units(*model), Not(HasSubstr("times")));
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      EXPECT_TRUE(full_value(model->parameters()[i]).allclose(plain->parameters()[i])) << i;
  });
}

INSTANTIATE_WORLDS(TimeLoops, 2, 3);

}  // namespace
}  // namespace fsdp::testing
