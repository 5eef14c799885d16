// Mixed precision: what modules compute with, what travels, and what is added up.
#include "tests/fully_shard/support/mixed_precision.h"

#include "tests/support/errors.h"

#include <gtest/gtest.h>

#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

class MixedPrecision : public Worlds {};

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
    Pair plain(4, 6, 3);
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
    EXPECT_EQ(half.reduced, whole.reduced) << "in the parameters' own dtype";
    EXPECT_LT(reduced.reduced, 0.6 * whole.reduced);  // flags travel as well
  });
}

TEST_P(MixedPrecision, GradientsAreReducedInReduceDtype) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto model = sharded(mesh, {.reduce_dtype = at::kBFloat16});
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
    const auto expected = mean_gradients(*Pair(4, 6, 3), world(), at::kFloat, at::kBFloat16);
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
        const auto reduced_in = policy.reduce_dtype.value_or(at::kFloat);
        EXPECT_EQ(counters(mesh).gradient_bytes, reduced_in == at::kFloat ? 4 * 12 : 2 * 12);
        backward(1);
      }
      backward(1);
      EXPECT_EQ(counters(mesh).gradient_bytes, 0);
      return full_gradient(linear->parameters()[0]);
    };
    const auto wide = gradient_after(computing_in(at::kBFloat16));
    EXPECT_TRUE(wide.equal(torch::full({4, 2}, 258.0))) << wide;
    const auto narrow =
        gradient_after({.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16});
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
    EXPECT_THAT(message_of([&] { strict(input_of(rank)); }), HasSubstr("same dtype"));
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

// [3, 2] of directions and lengths. On the CPU, too, its norms are float beside weights
// in 16 bits.
struct WeightNormedImpl : torch::nn::Module {
  WeightNormedImpl() {
    direction = register_parameter("direction", torch::linspace(-1, 1, 6).view({3, 2}));
    length = register_parameter("length", torch::linspace(1, 2, 3).view({3, 1}));
  }
  Tensor forward(const Tensor& x) {
    return torch::linear(x, torch::_weight_norm(direction, length, 0));
  }
  Tensor direction, length;
};
TORCH_MODULE(WeightNormed);

TEST_P(MixedPrecision, DerivativesComputeWithWhatForwardSaved) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    WeightNormed model, plain;
    fully_shard(model, mesh, {.mp_policy = computing_in(at::kBFloat16)});
    plain->to(at::kBFloat16);
    const auto x = torch::linspace(-1, 1, 8).view({4, 2}).to(at::kBFloat16);
    model(x).pow(2).sum().backward();
    plain(x).pow(2).sum().backward();
    for (size_t i = 0; i < 2; ++i) {
      const auto expected = plain->parameters()[i].grad().to(at::kFloat);
      EXPECT_TRUE(full_gradient(model->parameters()[i]).equal(expected)) << i;
    }
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
    EXPECT_THAT(refusal({.buffer_dtype = at::kInt}), HasSubstr("mp_policy.buffer_dtype is Int"));
    EXPECT_THAT(refusal({.output_dtype = at::kBool}), HasSubstr("mp_policy.output_dtype"));
    EXPECT_FALSE(is_fsdp_module(*linear));
  });
}

INSTANTIATE_WORLDS(MixedPrecision, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
