// Mixed precision: what modules compute with, what travels, and what is added up.
#include "fully_shard/forward.h"
#include "tests/fully_shard/effects/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <functional>
#include <tuple>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

class MixedPrecision : public Worlds {};

struct TwoLayersImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first = register_module("first", make_linear(4, 6));
  torch::nn::Linear second = register_module("second", make_linear(6, 3));
};
TORCH_MODULE(TwoLayers);

MixedPrecisionPolicy computing_in(at::ScalarType dtype) { return {.param_dtype = dtype}; }

TwoLayers sharded(const DeviceMesh& mesh, const MixedPrecisionPolicy& policy,
                  std::optional<ReshardAfterForward> reshard = {}) {
  TwoLayers model;
  const FullyShardOptions options{.reshard_after_forward = reshard, .mp_policy = policy};
  fully_shard(model->first, mesh, options);
  fully_shard(model->second, mesh, options);
  fully_shard(model, mesh, options);
  return model;
}

Tensor input_of(int64_t rank) {
  return torch::linspace(-1, 1, 8).view({2, 4}) * static_cast<double>(rank + 1);
}

// What a rank's backward adds to the gradients of a model whose parameters were rounded
// to `dtype`, in that dtype.
std::vector<Tensor> gradients_in(const torch::nn::Module& masters, at::ScalarType dtype,
                                 const Tensor& input) {
  TwoLayers rounded;
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < rounded->parameters().size(); ++i)
      rounded->parameters()[i].copy_(masters.parameters()[i]);
  }
  rounded->to(dtype);
  rounded->forward(input.to(dtype)).pow(2).sum().backward();
  std::vector<Tensor> gradients;
  for (const auto& parameter : rounded->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

// The mean over the ranks of gradients in `wire`, added up in float.
std::vector<Tensor> mean_gradients(const torch::nn::Module& masters, int64_t world,
                                   at::ScalarType compute, at::ScalarType wire) {
  std::vector<Tensor> mean;
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto gradients = gradients_in(masters, compute, input_of(rank));
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto term = gradients[i].to(wire).to(at::kFloat);
      if (rank == 0) {
        mean.push_back(term);
      } else {
        mean[i] = mean[i] + term;
      }
    }
  }
  for (auto& each : mean) each = each / world;
  return mean;
}

void expect_close(const Tensor& actual, const Tensor& expected, int64_t world) {
  ASSERT_TRUE(actual.defined());
  EXPECT_EQ(actual.scalar_type(), at::kFloat);
  // Up to two ranks there is one order of a sum.
  const double tolerance = world <= 2 ? 0 : 1e-6;
  EXPECT_TRUE(torch::allclose(actual, expected, tolerance, tolerance))
      << (actual - expected).abs().max();
}

TEST_P(MixedPrecision, MembersComputeInParamDtypeAndEntriesKeepTheirs) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    EXPECT_EQ(model->first->weight.scalar_type(), at::kBFloat16);
    const auto y = model(input_of(rank));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    for (const auto& entry : model->parameters()) {
      EXPECT_EQ(entry.scalar_type(), at::kFloat);
      EXPECT_EQ(entry.grad().scalar_type(), at::kFloat);
    }
  });
}

TEST_P(MixedPrecision, TrainsAsAModelWhoseParametersAreRoundedForEachStep) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    TwoLayers plain;
    torch::optim::SGD optimizer(model->parameters(), 0.1), reference(plain->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model(input_of(rank)).pow(2).sum().backward();
      const auto expected = mean_gradients(*plain, world(), at::kBFloat16, at::kBFloat16);
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_close(full_gradient(model->parameters()[i]), expected[i], world());
        plain->parameters()[i].mutable_grad() = expected[i];
      }
      optimizer.step();
      reference.step();
    }
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      expect_close(full_value(model->parameters()[i]), plain->parameters()[i].detach(), world());
  });
}

// Large enough for the padding of chunks not to count.
torch::nn::Linear large_linear() {
  torch::nn::Linear linear(torch::nn::LinearOptions(64, 48).bias(false));
  set_start_values(*linear);
  return linear;
}

TEST_P(MixedPrecision, HalfTheBytesAreGatheredAndReduced) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    struct Bytes {
      int64_t gathers, gathered, reduced;
    };
    const auto step = [&](const MixedPrecisionPolicy& policy) {
      auto linear = large_linear();
      fully_shard(linear, mesh, {.mp_policy = policy});
      const auto before = counters(mesh);
      linear(torch::ones({1, 64})).sum().backward();
      const auto after = counters(mesh);
      EXPECT_EQ(after.staging_bytes, 0);
      EXPECT_EQ(after.gradient_bytes, 0);
      return Bytes{after.all_gathers - before.all_gathers,
                   after.all_gather_bytes - before.all_gather_bytes,
                   after.reduce_scatter_bytes - before.reduce_scatter_bytes};
    };
    const auto whole = step({}), half = step(computing_in(at::kBFloat16)),
               reduced = step({.reduce_dtype = at::kBFloat16});
    if (world() == 1) {
      EXPECT_EQ(half.gathered + half.reduced, 0) << "nobody to send to";
      return;
    }
    EXPECT_EQ(half.gathers, whole.gathers);
    EXPECT_EQ(reduced.gathers, whole.gathers);
    EXPECT_EQ(2 * half.gathered, whole.gathered);
    EXPECT_EQ(reduced.gathered, whole.gathered);
    EXPECT_LT(half.reduced, 0.6 * whole.reduced);  // flags travel as well
    EXPECT_EQ(reduced.reduced, half.reduced);
  });
}

TEST_P(MixedPrecision, GradientsAreReducedInReduceDtype) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, {.reduce_dtype = at::kBFloat16});
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
    const auto expected = mean_gradients(*TwoLayers(), world(), at::kFloat, at::kBFloat16);
    model(input_of(rank)).pow(2).sum().backward();
    for (size_t i = 0; i < expected.size(); ++i)
      expect_close(full_gradient(model->parameters()[i]), expected[i], world());
  });
}

// In bfloat16 itself 256 + 1 is 256.
TEST_P(MixedPrecision, WithoutSynchronisationGradientsAreAddedUpInReduceDtype) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const auto gradient_after = [&mesh](const MixedPrecisionPolicy& policy) {
      auto linear = make_linear(2, 4);
      const auto unit = fully_shard(linear, mesh, {.mp_policy = policy});
      const auto backward = [&](double scale) {
        (linear(torch::ones({1, 2})) * scale).sum().backward();
      };
      {
        NoSyncGuard guard(unit);
        backward(256);
        EXPECT_EQ(counters(mesh).gradient_bytes, policy.reduce_dtype ? 4 * 12 : 2 * 12);
        backward(1);
      }
      backward(1);
      EXPECT_EQ(counters(mesh).gradient_bytes, 0);
      return full_gradient(linear->parameters()[0]);
    };
    const auto wide = gradient_after({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    EXPECT_TRUE(wide.equal(torch::full({4, 2}, 258.0))) << wide;
    const auto narrow = gradient_after(computing_in(at::kBFloat16));
    EXPECT_FALSE(narrow.equal(torch::full({4, 2}, 258.0))) << narrow;
  });
}

TEST_P(MixedPrecision, PendingGradientsInReduceDtypeCanBeDropped) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(2, 4);
    auto unit = fully_shard(
        linear, mesh, {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    {
      NoSyncGuard guard(unit);
      linear(torch::ones({1, 2})).sum().backward();
    }
    EXPECT_GT(counters(mesh).gradient_bytes, 0);
    EXPECT_THAT(message_of([&] { SummonFullParams(linear, {.with_grads = true}); }),
                HasSubstr("waits for synchronisation"));
    unit.zero_pending_gradients();
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    linear(torch::ones({1, 2})).sum().backward();
    EXPECT_TRUE(full_gradient(linear->parameters()[0]).equal(torch::ones({4, 2})));
  });
}

TEST_P(MixedPrecision, InputsAreCastWhereTheyMeetAParameterUnlessSwitchedOff) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto casting = sharded(mesh, computing_in(at::kBFloat16));
    auto input = input_of(rank).requires_grad_();
    casting(input).sum().backward();
    EXPECT_EQ(input.grad().scalar_type(), at::kFloat) << "the cast is part of the graph";
    auto strict = sharded(mesh, {.param_dtype = at::kBFloat16, .cast_forward_inputs = false});
    EXPECT_NE(message_of([&] { strict(input_of(rank)); }), "");
    EXPECT_EQ(strict(input_of(rank).to(at::kBFloat16)).scalar_type(), at::kBFloat16);
  });
}

TEST_P(MixedPrecision, WhatIsWrittenAndConvertedIsNotCast) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(2, 4);
    fully_shard(linear, mesh, {.mp_policy = computing_in(at::kBFloat16)});
    torch::NoGradGuard no_grad;
    auto target = torch::zeros({4, 2});
    target.copy_(linear->weight);
    EXPECT_EQ(target.scalar_type(), at::kFloat);
    EXPECT_TRUE(target.equal(linear->weight.to(at::kFloat)));
    EXPECT_EQ(linear->weight.to(at::kDouble).scalar_type(), at::kDouble);
  });
}

TEST_P(MixedPrecision, WritesToMembersReachTheShards) {
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

TEST_P(MixedPrecision, SummonedParametersAreThoseOfTheShardsAndLoseNothing) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    const TwoLayers plain;
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
TEST_P(MixedPrecision, WritesToMembersWhileCopiesAreShownPersist) {
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

TEST_P(MixedPrecision, ForwardCastsAtTheBoundary) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat});
    EXPECT_EQ(model(input_of(rank)).scalar_type(), at::kBFloat16);
    const auto output = forward(model, input_of(rank));
    EXPECT_EQ(output.scalar_type(), at::kFloat);
    output.sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), at::kFloat);
    const torch::nn::Linear plain(4, 2);
    EXPECT_EQ(forward(plain, input_of(rank)).scalar_type(), at::kFloat) << "no unit: as it is";
  });
}

struct PairsImpl : torch::nn::Module {
  std::tuple<Tensor, std::vector<Tensor>> forward(const std::vector<Tensor>& xs,
                                                  const std::optional<Tensor>& mask, int64_t n) {
    for (const auto& x : xs) dtypes.push_back(x.scalar_type());
    dtypes.push_back(mask->scalar_type());
    return {linear(xs[0]) * n, {torch::arange(3), linear(xs[1])}};
  }
  std::vector<at::ScalarType> dtypes;
  torch::nn::Linear linear = register_module("linear", make_linear(4, 4));
};
TORCH_MODULE(Pairs);

TEST_P(MixedPrecision, ForwardFindsTensorsInContainers) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Pairs model;
    fully_shard(model, mesh,
                {.mp_policy = {.param_dtype = at::kHalf, .output_dtype = at::kDouble}});
    const auto x = input_of(rank);
    const auto [sum, list] = forward(model, std::vector<Tensor>{x, x},
                                     std::optional<Tensor>(torch::ones({2})), int64_t{2});
    EXPECT_EQ(model->dtypes, std::vector<at::ScalarType>(3, at::kHalf));
    EXPECT_EQ(sum.scalar_type(), at::kDouble);
    EXPECT_EQ(list[0].scalar_type(), at::kLong);
    EXPECT_EQ(list[1].scalar_type(), at::kDouble);
  });
}

TEST_P(MixedPrecision, OtherDtypesAreRefusedByName) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto linear = make_linear(2, 4);
    const auto refusal = [&](const MixedPrecisionPolicy& policy) {
      return message_of([&] { fully_shard(linear, mesh, {.mp_policy = policy}); });
    };
    const auto here = "rank " + std::to_string(rank);
    EXPECT_THAT(refusal(computing_in(at::kInt)),
                AllOf(HasSubstr("mp_policy.param_dtype is Int"), HasSubstr(here)));
    EXPECT_THAT(refusal({.reduce_dtype = at::kLong}), HasSubstr("mp_policy.reduce_dtype"));
    EXPECT_THAT(refusal({.output_dtype = at::kBool}), HasSubstr("mp_policy.output_dtype"));
    EXPECT_FALSE(is_fsdp_module(*linear));
  });
}

INSTANTIATE_WORLDS(MixedPrecision, 1, 2, 3);

TEST(MixedPrecisionPolicies, KeepsPartsForNeighboursInParamDtype) {
  on_ranks_of(4, [](int64_t rank, const DeviceMesh& mesh) {
    const auto kept_bytes = [&](const MixedPrecisionPolicy& policy) {
      auto linear = large_linear();
      fully_shard(linear, mesh,
                  {.reshard_after_forward = ReshardAfterForward::to_world(2), .mp_policy = policy});
      auto after = make_linear(48, 2);  // ends the turn of the one before
      fully_shard(after, mesh);
      const auto y = after(linear(torch::ones({1, 64})).to(at::kFloat));
      return counters(mesh).post_forward_bytes;
    };
    EXPECT_GT(kept_bytes({}), 0);
    EXPECT_EQ(2 * kept_bytes(computing_in(at::kBFloat16)), kept_bytes({}));
    auto model = sharded(mesh, computing_in(at::kBFloat16), ReshardAfterForward::to_world(2));
    model(input_of(rank)).pow(2).sum().backward();
    const auto expected = mean_gradients(*TwoLayers(), 4, at::kBFloat16, at::kBFloat16);
    for (size_t i = 0; i < expected.size(); ++i)
      expect_close(full_gradient(model->parameters()[i]), expected[i], 4);
  });
}

TEST(MixedPrecisionPolicies, ReducesOverReplicasInFloat) {
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    auto model = sharded(mesh, computing_in(at::kBFloat16));
    model(input_of(rank)).pow(2).sum().backward();
    const auto expected = mean_gradients(*TwoLayers(), 4, at::kBFloat16, at::kBFloat16);
    for (size_t i = 0; i < expected.size(); ++i)
      expect_close(full_gradient(model->parameters()[i]), expected[i], 4);
  });
}

}  // namespace
}  // namespace fsdp::testing
