// What may be done while full parameters are shown, and initialisers over a sharded
// model.
#include "tests/fully_shard/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/start_values.h"
#include "tests/support/thread_ranks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SummonScope : public ::testing::TestWithParam<int64_t> {
 protected:
  void on_ranks(const std::function<void(int64_t, const DeviceMesh&)>& body) const {
    run_ranks(GetParam(),
              [&](int64_t rank) { body(rank, init_device_mesh(torch::kCPU, {GetParam()})); });
  }
};

TEST_P(SummonScope, AForwardInsideHasTheRightNumbersOfEditsToo) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto plain = build_seeded([] { return decoder_model(5, 2); });
    auto sharded = build_seeded([] { return decoder_model(5, 2); });
    shard_decoder(*sharded.module, mesh);
    torch::NoGradGuard no_grad;
    SummonFullParams full(sharded.module);
    EXPECT_TRUE(torch::equal(sharded.loss(make_data(1)), plain.loss(make_data(1))));
    for (const auto& module : {plain.module, sharded.module}) {
      for (auto& parameter : module->parameters()) parameter.mul_(0.5);
    }
    EXPECT_TRUE(torch::equal(sharded.loss(make_data(2)), plain.loss(make_data(2))));
  });
}

TEST_P(SummonScope, ABackwardInsideIsAnErrorAndTheNextStepIsRight) {
  on_ranks([this](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(5, 1); });
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*sharded.module, mesh);
    const auto mine = make_data(407 + static_cast<uint64_t>(rank));
    {
      SummonFullParams full(sharded.module);
      EXPECT_THAT(message_of([&] { sharded.loss(mine).backward(); }),
                  AllOf(HasSubstr("SummonFullParams"), HasSubstr("close it first")));
    }
    const auto expected = expected_gradients(plain, GetParam(), 4);
    sharded.loss(mine).backward();
    expect_gradients(*sharded.module, expected, GetParam(), "after the scope");
  });
}

TEST_P(SummonScope, ASeededInitialiserGivesTheWeightsOfTheUnshardedModel) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto plain = build_seeded([] { return decoder_model(5, 3); });
    auto sharded = build_seeded([] { return decoder_model(5, 3); });
    shard_decoder(*sharded.module, mesh);
    // Each rank has a generator of its own: the default one is shared by threads.
    const auto initialiser = [](std::vector<std::string>& order) {
      return [&order, generator = at::make_generator<at::CPUGeneratorImpl>(7)](
                 torch::nn::Module& module) mutable {
        order.push_back(module.name());
        torch::NoGradGuard no_grad;
        for (auto& parameter : module.parameters(/*recurse=*/false))
          parameter.normal_(0, 1, generator);
      };
    };
    std::vector<std::string> expected_order, order;
    plain.module->apply(initialiser(expected_order));
    const auto before = counters(mesh).all_gathers;
    apply_unsharded(*sharded.module, initialiser(order));
    EXPECT_EQ(order, expected_order);
    const auto units = static_cast<int64_t>(fsdp_modules(*sharded.module).size());
    EXPECT_LE(counters(mesh).all_gathers - before, 2 * units)
        << "each unit once, and prefetches that nobody wanted";
    EXPECT_EQ(counters(mesh).unsharded_bytes, 0);
    const auto actual = sharded.module->parameters(), expected = plain.module->parameters();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::equal(DTensor(actual[i]).full_tensor(), expected[i])) << i;
  });
}

TEST_P(SummonScope, LoadingAFileInsideSaysToCloseTheScopeFirst) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(3, 5), source = make_linear(3, 5);
    {
      torch::NoGradGuard no_grad;  // the same on every rank
      for (auto& parameter : source->parameters())
        parameter.copy_(torch::arange(parameter.numel()).view(parameter.sizes()));
    }
    std::stringstream file;
    torch::save(source, file);
    fully_shard(linear, mesh);
    {
      SummonFullParams full(linear);
      EXPECT_THAT(
          message_of([&] { torch::load(linear, file); }),
          AllOf(HasSubstr("'weight'"), HasSubstr("SummonFullParams"), HasSubstr("close it first")));
    }
    file.seekg(0);
    torch::load(linear, file);
    EXPECT_TRUE(
        torch::equal(DTensor(linear->parameters()[0]).full_tensor(), source->parameters()[0]));
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, SummonScope, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace fsdp::testing
