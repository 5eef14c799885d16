// Mixed precision: writes to members, and full parameters, which are in the dtype of the
// shards.
#include "tests/fully_shard/support/mixed_precision.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

class FullPrecision : public Worlds {};

TEST_P(FullPrecision, WritesToMembersReachTheShards) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    {
      torch::NoGradGuard no_grad;
      model->first->weight.fill_(1.0 / 3);
    }
    const auto rounded = torch::full({6, 4}, 1.0 / 3).to(at::kBFloat16).to(at::kFloat);
    EXPECT_TRUE(full_value(model->parameters()[0]).equal(rounded));
    EXPECT_TRUE(model->first->weight.detach().to(at::kFloat).equal(rounded));
  });
}

TEST_P(FullPrecision, SummonedParametersAreThoseOfTheShardsAndLoseNothing) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    const Pair plain(4, 6, 3);
    model(input_of(rank)).sum().backward();
    {
      SummonFullParams full(model, {.with_grads = true});
      for (size_t i = 0; i < plain->parameters().size(); ++i) {
        EXPECT_TRUE(model->parameters()[i].equal(plain->parameters()[i])) << i;
        EXPECT_EQ(model->parameters()[i].grad().sizes(), plain->parameters()[i].sizes());
      }
      torch::NoGradGuard no_grad;
      model->second->named_parameters()["bias"].fill_(1.0 / 3);
    }
    for (size_t i = 0; i + 1 < plain->parameters().size(); ++i)
      EXPECT_TRUE(full_value(model->parameters()[i]).equal(plain->parameters()[i])) << i;
    EXPECT_TRUE(full_value(model->parameters()[3]).equal(torch::full({3}, 1.0 / 3)));
    int64_t seen = 0;
    for_each_full_param(*model, [&](const std::string&, const Tensor& value) {
      EXPECT_EQ(value.scalar_type(), at::kFloat);
      ++seen;
    });
    EXPECT_EQ(seen, 4);
  });
}

// apply_unsharded with reset_parameters() writes members; named_parameters() gives
// copies.
TEST_P(FullPrecision, WritesToMembersWhileCopiesAreShownPersist) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    apply_unsharded(*model, [](torch::nn::Module& module) {
      torch::NoGradGuard no_grad;
      if (auto* linear = module.as<torch::nn::LinearImpl>()) {
        linear->weight.fill_(0.5);
        linear->named_parameters()["bias"].fill_(1.0 / 3);
      }
    });
    EXPECT_TRUE(full_value(model->parameters()[0]).equal(torch::full({6, 4}, 0.5)));
    EXPECT_TRUE(full_value(model->parameters()[1]).equal(torch::full({6}, 1.0 / 3)));
  });
}

// What the unsharded model computes, cast as `dtype` asks.
Tensor plain_output(Pair plain, std::optional<at::ScalarType> dtype, const Tensor& input) {
  if (!dtype) return plain->forward(input);
  Pair rounded(4, 6, 3);
  rounded->to(*dtype);
  return rounded->forward(input.to(*dtype));
}

TEST_P(FullPrecision, IsForEvaluations) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    const Pair plain(4, 6, 3);
    auto root = get_fsdp_module(*model);
    const auto forward = [&] {
      const torch::NoGradGuard no_grad;
      return model(input_of(rank));
    };
    const auto half = forward();
    EXPECT_TRUE(half.equal(plain_output(plain, at::kBFloat16, input_of(rank))));
    root.set_full_precision(true);
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
    const auto full = forward();
    EXPECT_TRUE(full.equal(plain_output(plain, {}, input_of(rank))));
    EXPECT_TRUE(fsdp::forward(*model, input_of(rank)).equal(full));
    root.set_full_precision(false);
    EXPECT_EQ(model->first->weight.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(forward().equal(half));
    model(input_of(rank)).sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST_P(FullPrecision, GathersTheBytesOfTheShards) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto linear = large_linear();
    auto unit = fully_shard(linear, mesh, {.mp_policy = computing_in(at::kBFloat16)});
    const auto gathered = [&] {
      return traffic_of(mesh,
                        [&] {
                          unit.unshard();
                          unit.reshard();
                        })
          .all_gather_bytes;
    };
    const auto half = gathered();
    unit.set_full_precision(true);
    EXPECT_EQ(gathered(), 2 * half);
    unit.set_full_precision(false);
    EXPECT_EQ(gathered(), half);
  });
}

TEST_P(FullPrecision, KeepsWhatWasWrittenAndRecursesOnlyWhereAsked) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    {
      const torch::NoGradGuard no_grad;
      model->first->weight.fill_(0.5);
    }
    get_fsdp_module(*model->first).set_full_precision(true, /*recurse=*/false);
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
    EXPECT_EQ(model->second->weight.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(full_value(model->parameters()[0]).equal(torch::full({6, 4}, 0.5)));
    EXPECT_TRUE(model->first->weight.detach().equal(torch::full({6, 4}, 0.5)));
  });
}

TEST_P(FullPrecision, WaitsForGraphsAndHolds) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    auto root = get_fsdp_module(*model);
    auto loss = model(input_of(rank)).sum();
    expect_error<c10::ValueError>(
        [&] { root.set_full_precision(true); },
        AllOf(HasSubstr("set_full_precision"), HasSubstr("graph"), HasSubstr("'first.weight'")));
    loss.backward();
    loss.reset();
    {
      const SummonFullParams full(model);
      EXPECT_THROW(root.set_full_precision(true), c10::ValueError);
    }
    root.set_full_precision(true);
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
  });
}

TEST_P(FullPrecision, ChangesAllUnitsOrNone) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    const auto alive = model->second(torch::ones({1, 6}) * static_cast<double>(rank));
    EXPECT_THROW(get_fsdp_module(*model).set_full_precision(true), c10::ValueError);
    EXPECT_EQ(model->first->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(model->second->weight.scalar_type(), at::kBFloat16);
  });
}

INSTANTIATE_WORLDS(FullPrecision, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
