// A user's hook on the sums of a unit's gradients.
#include "tests/fully_shard/support/pair.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class AllReduceHook : public Worlds {};

Pair sharded_layers(const DeviceMesh& mesh) { return sharded(Pair(3, 4, 2), mesh); }

Tensor row_of_rank(int64_t rank) { return torch::full({2, 3}, static_cast<double>(rank + 1)); }

void run_backward(Pair& model, int64_t rank) { model(row_of_rank(rank)).sum().backward(); }

TEST_P(AllReduceHook, SeesTheSumOfEachReductionOnceAndWritesTheGradients) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded_layers(mesh);
    run_backward(model, rank);
    std::vector<Tensor> expected;
    for (const auto& parameter : model->parameters())
      expected.push_back(full_gradient(parameter).clone());
    model->zero_grad();
    std::vector<Tensor> seen;
    get_fsdp_module(*model->first).set_all_reduce_hook([&](const Tensor& sum) {
      EXPECT_FALSE(torch::GradMode::is_enabled());
      seen.push_back(sum.clone());
      sum.mul_(3);
    });
    run_backward(model, rank);
    ASSERT_EQ(seen.size(), 1U) << "of the unit that has it, once";
    EXPECT_EQ(seen[0].dim(), 1);
    EXPECT_EQ(seen[0].scalar_type(), at::kFloat);
    const auto local = DTensor(model->first->parameters()[0].grad()).to_local();
    const auto part = seen[0].narrow(0, 0, local.numel()).view_as(local);
    EXPECT_TRUE(part.mul(3).div(world()).equal(local)) << "before the division";
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto factor = i < 2 ? 3.0 : 1.0;
      EXPECT_TRUE(torch::allclose(full_gradient(model->parameters()[i]), factor * expected[i]))
          << i;
    }
    get_fsdp_module(*model->first).set_all_reduce_hook({});
    model->zero_grad();
    run_backward(model, rank);
    EXPECT_EQ(seen.size(), 1U);
    EXPECT_TRUE(full_gradient(model->parameters()[0]).equal(expected[0]));
  });
}

TEST_P(AllReduceHook, IsNotCalledWithoutSynchronisation) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded_layers(mesh);
    int calls = 0;
    auto unit = get_fsdp_module(*model->second);
    unit.set_all_reduce_hook([&](const Tensor&) { ++calls; });
    {
      NoSyncGuard guard(get_fsdp_module(*model));
      run_backward(model, rank);
    }
    EXPECT_EQ(calls, 0);
    run_backward(model, rank);
    EXPECT_EQ(calls, 1);
  });
}

TEST_P(AllReduceHook, ItsExceptionIsTheBackwards) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded_layers(mesh);
    auto unit = get_fsdp_module(*model->first);
    unit.set_all_reduce_hook([](const Tensor&) { throw std::runtime_error("from the hook"); });
    EXPECT_THAT(message_of([&] { run_backward(model, rank); }), HasSubstr("from the hook"));
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    unit.set_all_reduce_hook({});
    model->zero_grad();
    run_backward(model, rank);
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST_P(AllReduceHook, GivesAllItsParametersGradients) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Pair model(3, 4, 2);
    auto unit = fully_shard(model, mesh);
    const auto backward_of_first = [&] { model->first(torch::ones({1, 3})).sum().backward(); };
    backward_of_first();
    EXPECT_FALSE(model->second->parameters()[0].grad().defined());
    unit.set_all_reduce_hook([](const Tensor& sum) { sum.add_(1); });
    backward_of_first();
    EXPECT_TRUE(model->second->parameters()[0].grad().defined());
  });
}

INSTANTIATE_WORLDS(AllReduceHook, 1, 2, 3);

// What a hook is for: shards in each half of the ranks, sums over the halves.
TEST(AllReduceHookOverReplicas, IsHybridSharding) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    auto native = sharded_layers(mesh);
    run_backward(native, rank);
    auto by_hook = sharded_layers(mesh["shard"]);
    for (auto unit : fsdp_modules(*by_hook)) {
      unit.set_all_reduce_hook([&mesh](const Tensor& sum) {
        std::vector<Tensor> tensors{sum};
        mesh.group(0)->allreduce(tensors)->wait();
        sum.div_(2);
      });
    }
    run_backward(by_hook, rank);
    for (size_t i = 0; i < native->parameters().size(); ++i) {
      EXPECT_TRUE(
          full_gradient(by_hook->parameters()[i]).equal(full_gradient(native->parameters()[i])))
          << i;
    }
  });
}

TEST(AllReduceHookOverReplicas, IsCalledAfterTheReplicasWereAddedUp) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    auto linear = make_linear(3, 4);
    auto unit = fully_shard(linear, mesh);
    double seen = 0;
    unit.set_all_reduce_hook([&](const Tensor& sum) { seen = sum[0].item<double>(); });
    linear(row_of_rank(rank)).sum().backward();
    EXPECT_EQ(seen, 2.0 * (1 + 2 + 3 + 4));
  });
}

}  // namespace
}  // namespace fsdp::testing
