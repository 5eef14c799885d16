// Whole programs: random numbers of their own generator, ends without a clean-up, models
// of many or of large parts, other threads.
#include "device_mesh/process_group.h"
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/full_value.h"
#include "tests/support/on_another_thread.h"
#include "tests/support/process_ranks.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using std::chrono::seconds;

DeviceMesh join() {
  init_process_group({.backend = "gloo", .timeout = seconds(20)});
  return init_device_mesh(torch::kCPU, {launch_environment().world_size});
}

void expect_all_succeed(const std::string& child) {
  for (const auto& end : run_processes(child, 2, seconds(60))) {
    EXPECT_FALSE(end.killed_at_deadline) << end.output;
    EXPECT_EQ(end.exit_code, 0) << end.output;
  }
}

int failed(const char* what) {
  std::printf("failed: %s\n", what);
  return 1;
}

struct WithDropout : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::dropout(torch::tanh(first(x)), 0.5, /*train=*/true));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(16, 64));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(64, 3));
};

// Draws, trains with dropout and draws again.
struct Trace {
  torch::Tensor loss, gradient, state;
};
Trace trace_of(WithDropout& model) {
  torch::manual_seed(11);
  auto loss = model.forward(torch::randn({8, 16})).pow(2).sum();
  loss.backward();
  return {loss.detach(), full_gradient(model.first->parameters()[0]),
          at::detail::getDefaultCPUGenerator().get_state()};
}

const ChildCase kDrops("drops_activations", [] {
  const auto mesh = join();
  torch::manual_seed(3);
  const auto plain = std::make_shared<WithDropout>();
  torch::manual_seed(3);
  const auto sharded = std::make_shared<WithDropout>();
  shard_children(*sharded, mesh);
  const auto expected = trace_of(*plain), actual = trace_of(*sharded);
  if (!torch::equal(actual.loss, expected.loss)) return failed("loss");
  if (!torch::equal(actual.gradient, expected.gradient)) return failed("gradient");
  if (!torch::equal(actual.state, expected.state)) return failed("generator");
  destroy_process_group();
  return 0;
});

TEST(Programs, DropoutDrawsWhatItDrawsUnsharded) { expect_all_succeed("drops_activations"); }

const ChildCase kResets("resets_parameters", [] {
  const auto mesh = join();
  torch::manual_seed(3);
  torch::nn::Linear plain(6, 5), sharded = make_linear(6, 5);
  fully_shard(sharded, mesh);
  torch::manual_seed(3);
  sharded->reset_parameters();
  const auto weight = full_value(sharded->parameters()[0]);
  if (!torch::equal(weight, plain->weight)) return failed("reset_parameters");
  torch::NoGradGuard no_grad;
  torch::manual_seed(4);
  torch::nn::init::xavier_uniform_(plain->weight);
  torch::manual_seed(4);
  torch::nn::init::xavier_uniform_(sharded->weight);
  if (!torch::equal(sharded->weight.clone(), plain->weight)) return failed("init of a member");
  torch::manual_seed(5);
  torch::nn::init::normal_(plain->weight);
  torch::manual_seed(5);
  torch::nn::init::normal_(sharded->parameters()[0]);
  if (!torch::equal(full_value(sharded->parameters()[0]), plain->weight))
    return failed("init of an entry");
  destroy_process_group();
  return 0;
});

TEST(Programs, SeededResetsGiveTheUnshardedWeights) { expect_all_succeed("resets_parameters"); }

std::shared_ptr<WithDropout>& static_model() {
  static std::shared_ptr<WithDropout> model;
  return model;
}

const ChildCase kLeaves("leaves_without_a_word", [] {
  const auto mesh = join();
  torch::manual_seed(3);
  static_model() = std::make_shared<WithDropout>();
  shard_children(*static_model(), mesh);
  static torch::optim::AdamW optimizer(static_model()->parameters(), 0.1);
  static_model()->forward(torch::ones({1, 16})).sum().backward();
  optimizer.step();
  return 0;  // no destroy_process_group, and models die after main
});

TEST(Programs, MayEndWithStaticModelsAndWithoutDestroyingTheGroup) {
  expect_all_succeed("leaves_without_a_word");
}

class ProgramsOnWorlds : public Worlds {};

TEST_P(ProgramsOnWorlds, OfManyTinyUnitsTrain) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    constexpr int64_t kUnits = 200;
    torch::nn::Sequential model;
    for (int64_t i = 0; i < kUnits; ++i) {
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(false)));
      torch::NoGradGuard no_grad;
      model->parameters().back().copy_(torch::eye(2));
    }
    for (const auto& layer : model->children()) fully_shard(*layer, mesh);
    fully_shard(model, mesh);
    const auto before = counters(mesh);
    model->forward(torch::ones({1, 2})).sum().backward();
    EXPECT_EQ(counters(mesh).reduce_scatters - before.reduce_scatters, kUnits);
    for (const auto& parameter : model->parameters())
      EXPECT_TRUE(torch::equal(full_gradient(parameter), torch::ones({2, 2})));
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

// The full parameter, its gradient, and a row or two of each on the way.
TEST_P(ProgramsOnWorlds, OfOneLargeParameterNeedLittleMoreThanItAndItsGradient) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    constexpr int64_t kRows = 1536, kBytes = kRows * kRows * 4;
    torch::nn::Linear layer(torch::nn::LinearOptions(kRows, kRows).bias(false));
    {
      torch::NoGradGuard no_grad;
      layer->weight.fill_(0.5);
    }
    fully_shard(layer, mesh);
    reset_peak(mesh);
    layer(torch::ones({1, kRows})).sum().backward();
    EXPECT_LE(counters(mesh).peak_bytes, 3 * kBytes + kBytes / world() + 16 * 1024);
    EXPECT_EQ(resident_bytes(counters(mesh)) + counters(mesh).gradient_bytes, 0);
    EXPECT_TRUE(torch::equal(full_gradient(layer->parameters()[0]), torch::ones({kRows, kRows})));
  });
}

TEST_P(ProgramsOnWorlds, MayTrainOnAnotherThreadThanTheOneThatSharded) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(8, 2); });
    auto sharded = build_seeded([] { return decoder_model(8, 2); });
    shard_decoder(*sharded.module, mesh);
    const auto mine = make_data(407 + static_cast<uint64_t>(rank));
    on_another_thread([&] { sharded.loss(mine).backward(); });
    expect_gradients(*sharded.module, expected_gradients(plain, mesh.size(), 4), mesh.size(),
                     "on another thread");
  });
}

INSTANTIATE_WORLDS(ProgramsOnWorlds, 2, 3);

}  // namespace
}  // namespace fsdp::testing
