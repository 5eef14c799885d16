// FullyShardOptions::gradient_codecs: what travels in the place of gradients, in the
// reduce-scatter over the ranks that shard and in the sum over the replicas.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/torch.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Codec = std::shared_ptr<const GatherCodec>;
using torch::Tensor;

// Of two bytes for each value, so that what becomes of one does not depend on others.
Codec bfloat16_codec() {
  auto codec = std::make_shared<GatherCodec>();
  codec->name = "two bytes";
  codec->row_bytes = [](int64_t elements) { return 2 * elements; };
  codec->encode = [](const Tensor& values, const Tensor& codes) {
    codes.copy_(values.to(at::kBFloat16).view(at::kByte));
  };
  codec->decode = [](const Tensor& codes, const Tensor& values) {
    values.copy_(codes.contiguous().view(at::kBFloat16));
  };
  return codec;
}

// Whole numbers from -127 to 127 in a byte each: coarse. What is not finite is infinity.
Codec whole_numbers() {
  auto codec = std::make_shared<GatherCodec>();
  codec->name = "whole numbers";
  codec->row_bytes = [](int64_t elements) { return elements; };
  codec->encode = [](const Tensor& values, const Tensor& codes) {
    const auto numbers = values.round().clamp(-127, 127);
    codes.copy_(
        numbers.masked_fill(values.isfinite().logical_not(), -128).to(at::kChar).view(at::kByte));
  };
  codec->decode = [](const Tensor& codes, const Tensor& values) {
    const auto numbers = codes.contiguous().view(at::kChar);
    values.copy_(numbers);
    values.masked_fill_(numbers.eq(-128), std::numeric_limits<double>::infinity());
  };
  return codec;
}

Tensor rounded(const Tensor& value) { return value.to(at::kBFloat16).to(at::kFloat); }

FullyShardOptions with(GradientCodecs codecs, FullyShardOptions options = {}) {
  options.gradient_codecs = std::move(codecs);
  return options;
}

// The gradients of `rank`, of a linear layer's weight and bias.
std::vector<Tensor> gradients_of_rank(const torch::nn::Linear& layer, int64_t rank) {
  const auto weight = torch::linspace(-1, 2, layer->weight.numel()).view(layer->weight.sizes());
  const auto bias = torch::linspace(3, 4, layer->bias.numel());
  return {weight * static_cast<double>(rank + 1), bias / static_cast<double>(rank + 2)};
}

// With a mark before each row, without which it refuses to decode.
Codec marked_codec() {
  auto codec = std::make_shared<GatherCodec>();
  codec->name = "two bytes";
  codec->row_bytes = [](int64_t elements) { return 1 + 2 * elements; };
  codec->encode = [](const Tensor& values, const Tensor& codes) {
    codes.select(1, 0).fill_(0x5a);
    codes.narrow(1, 1, codes.size(1) - 1).copy_(values.to(at::kBFloat16).view(at::kByte));
  };
  codec->decode = [](const Tensor& codes, const Tensor& values) {
    TORCH_CHECK(codes.select(1, 0).eq(0x5a).all().item<bool>(), "no mark");
    values.copy_(codes.narrow(1, 1, codes.size(1) - 1)
                     .clone(at::MemoryFormat::Contiguous)
                     .view(at::kBFloat16));
  };
  return codec;
}

// A backward that gives them.
void backward_on(torch::nn::Linear& layer, const std::vector<Tensor>& gradients) {
  ((layer->weight * gradients[0]).sum() + (layer->bias * gradients[1]).sum()).backward();
}

class GradientsAsCodes : public Worlds {};

TEST_P(GradientsAsCodes, AreDecodedAndAddedInTheOrderOfTheRanks) {
  for (const auto& placement : {std::optional<Placement>(), std::optional<Placement>(Owned{})}) {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
      auto layer = make_linear(40, 7);
      std::vector<Tensor> expected(2);
      for (int64_t each = 0; each < world(); ++each) {
        const auto own = gradients_of_rank(layer, each);
        for (size_t i = 0; i < 2; ++i) {
          const auto term = world() == 1 ? own[i] : rounded(own[i]);
          expected[i] = expected[i].defined() ? expected[i] + term : term;
        }
      }
      const auto gradients = gradients_of_rank(layer, rank);
      fully_shard(
          layer, mesh,
          with({.shards = bfloat16_codec()},
               {.shard_placement_fn = [&](const auto&, const auto&) { return placement; }}));
      for (int step = 0; step < 2; ++step) {
        layer->zero_grad();
        backward_on(layer, gradients);
        for (size_t i = 0; i < 2; ++i)
          EXPECT_TRUE(full_gradient(layer->parameters()[i]).equal(expected[i] / world())) << i;
      }
    });
  }
}

TEST_P(GradientsAsCodes, FewerBytesTravelAndFlagsStayExact) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const auto reduced = [&](const GradientCodecs& codecs, double& bytes) {
      torch::nn::Linear layer(1024, 240);
      set_start_values(*layer);
      fully_shard(layer, mesh, with(codecs));
      const auto before = counters(mesh).reduce_scatter_bytes;
      // Rank 0 alone uses the weight, the others the bias.
      (rank == 0 ? layer->weight : layer->bias).sum().backward();
      const auto share = 1.0 / static_cast<double>(world());
      EXPECT_TRUE(
          full_gradient(layer->parameters()[0]).allclose(torch::full({240, 1024}, share), 0.02, 0));
      ASSERT_EQ(layer->parameters()[1].grad().defined(), world() > 1);
      if (world() > 1) {
        EXPECT_TRUE(
            full_gradient(layer->parameters()[1]).allclose(torch::full({240}, 1 - share), 0.02, 0));
      }
      EXPECT_EQ(counters(mesh).gradient_bytes, 0);
      EXPECT_EQ(counters(mesh).staging_bytes, 0);
      bytes = static_cast<double>(counters(mesh).reduce_scatter_bytes - before);
    };
    double whole = 0, codes = 0;
    reduced({}, whole);
    reduced({.shards = mxint8()}, codes);
    EXPECT_NEAR(codes, whole * (1 + 1.0 / 32) / 4, whole * 0.002);
  });
}

TEST_P(GradientsAsCodes, RoundedAtRandomHaveTheSumAsTheirMean) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(64, 6);
    const auto gradients = gradients_of_rank(layer, rank);
    std::vector<Tensor> expected = {torch::zeros({6, 64}), torch::zeros({6})};
    for (int64_t each = 0; each < world(); ++each)
      for (size_t i = 0; i < 2; ++i) expected[i] += gradients_of_rank(layer, each)[i] / world();
    fully_shard(layer, mesh, with({.shards = mxint8()}));
    constexpr int kSteps = 400;
    std::vector<Tensor> sums = {torch::zeros({6, 64}), torch::zeros({6})};
    Tensor first;
    for (int step = 0; step < kSteps; ++step) {
      layer->zero_grad();
      backward_on(layer, gradients);
      for (size_t i = 0; i < 2; ++i) sums[i] += full_gradient(layer->parameters()[i]);
      if (step == 0) first = full_gradient(layer->parameters()[0]);
      if (step == 1 && world() > 1) {
        EXPECT_FALSE(first.equal(full_gradient(layer->parameters()[0]))) << "each step draws anew";
      }
    }
    // Six deviations of the mean, of rounding to multiples of at most 2 * largest / 64.
    for (size_t i = 0; i < 2; ++i) {
      const auto step_size = 2.0 * 2.0 * static_cast<double>(world()) / 64;
      const auto bound = 6 * step_size / 2 / std::sqrt(kSteps * static_cast<double>(world()));
      EXPECT_LT((sums[i] / kSteps - expected[i]).abs().max().item<double>(), bound) << i;
    }
  });
}

TEST_P(GradientsAsCodes, WhatIsNotFiniteArrives) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(64, 6);
    auto gradients = gradients_of_rank(layer, rank);
    if (rank == 0) gradients[0][3][5] = std::numeric_limits<float>::infinity();
    if (rank == 0) gradients[0][4][6] = std::numeric_limits<float>::quiet_NaN();
    fully_shard(layer, mesh, with({.shards = mxint8()}));
    backward_on(layer, gradients);
    const auto gradient = full_gradient(layer->parameters()[0]);
    EXPECT_TRUE(std::isinf(gradient[3][5].item<float>()));
    EXPECT_TRUE(std::isnan(gradient[4][6].item<float>()));
    EXPECT_EQ(gradient.isfinite().logical_not().sum().item<int64_t>(), 2);
  });
}

// A gradient of 1e-4 beside one of 1e4 of another parameter keeps its digits.
TEST_P(GradientsAsCodes, BlocksHaveElementsOfOneParameter) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(3, 5);
    fully_shard(layer, mesh, with({.shards = mxint8()}));
    backward_on(layer, {torch::full({5, 3}, 1e-4), torch::full({5}, 1e4)});
    EXPECT_TRUE(full_gradient(layer->parameters()[0]).allclose(torch::full({5, 3}, 1e-4), 0.04, 0));
    EXPECT_TRUE(full_gradient(layer->parameters()[1]).allclose(torch::full({5}, 1e4), 0.04, 0));
  });
}

INSTANTIATE_WORLDS(GradientsAsCodes, 1, 2, 3, 4);

struct Replicated {
  std::vector<int64_t> mesh;
  Outer outer;
};

int64_t sums_over_replicas(const DeviceMesh& mesh) {
  const auto counted = counters(mesh);
  return counted.all_reduces + counted.outer_reduce_scatters;
}

class ReplicaCodes : public ::testing::TestWithParam<Replicated> {
 protected:
  int64_t replicas() const { return GetParam().mesh[0]; }
  int64_t shards() const { return GetParam().mesh[1]; }
  bool cuts_once_more() const { return GetParam().outer == Outer::kShardOptimizer; }
};

TEST_P(ReplicaCodes, AreOfTheSumsOverTheShards) {
  run_ranks(replicas() * shards(), [&](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, GetParam().mesh);
    auto layer = make_linear(40, 7);
    std::vector<Tensor> expected(2);
    for (size_t i = 0; i < 2; ++i) {
      for (int64_t replica = 0; replica < replicas(); ++replica) {
        Tensor sum;
        for (int64_t shard = 0; shard < shards(); ++shard) {
          const auto term = gradients_of_rank(layer, replica * shards() + shard)[i];
          sum = sum.defined() ? sum + term : term;
        }
        expected[i] = expected[i].defined() ? expected[i] + rounded(sum) : rounded(sum);
      }
      if (!cuts_once_more()) expected[i] = rounded(expected[i]);
      expected[i] = expected[i] / (replicas() * shards());
    }
    const auto gradients = gradients_of_rank(layer, rank);
    fully_shard(layer, mesh, with({.replicas = bfloat16_codec()}, {.outer = GetParam().outer}));
    for (int step = 0; step < 2; ++step) {
      layer->zero_grad();
      backward_on(layer, gradients);
      for (size_t i = 0; i < 2; ++i)
        EXPECT_TRUE(full_gradient(layer->parameters()[i]).equal(expected[i])) << i;
    }
  });
}

// Gradients of 0.3 to 1.2 in whole numbers: without feedback every step rounds alike, and
// most of them are lost.
TEST_P(ReplicaCodes, WithErrorFeedbackWhatIsLostComesWithLaterSteps) {
  run_ranks(replicas() * shards(), [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, GetParam().mesh);
    const auto trained = [&](bool error_feedback) {
      auto layer = make_linear(16, 8);
      const std::vector<Tensor> gradients = {
          torch::linspace(0.3, 1.2, 128).view({8, 16}) / shards(),
          torch::full({8}, 0.4) / shards()};
      fully_shard(layer, mesh,
                  with({.replicas = whole_numbers(), .error_feedback = error_feedback},
                       {.outer = GetParam().outer}));
      const auto before = counters(mesh).gradient_bytes;
      auto sum = torch::zeros({8, 16});
      for (int step = 0; step < 50; ++step) {
        layer->zero_grad();
        backward_on(layer, gradients);
        sum += full_gradient(layer->parameters()[0]) * shards();
      }
      EXPECT_EQ(counters(mesh).gradient_bytes > before, error_feedback)
          << "the residual is counted";
      return (sum / 50 - gradients[0] * shards()).abs().max().item<float>();
    };
    EXPECT_LT(trained(true), 0.06f);
    EXPECT_GT(trained(false), 0.2f);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

// Three layers, of which the last one's gradients have gone over the replicas when the
// backward fails.
TEST_P(ReplicaCodes, AFailedBackwardLeavesTheResidual) {
  run_ranks(replicas() * shards(), [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, GetParam().mesh);
    const auto steps = [&](bool fails) {
      torch::nn::Sequential model(make_linear(16, 8), make_linear(16, 8), make_linear(16, 8));
      for (const auto& layer : model->children())
        fully_shard(layer, mesh,
                    with({.replicas = whole_numbers(), .error_feedback = true},
                         {.outer = GetParam().outer}));
      const auto loss = [&] {
        auto sum = torch::zeros({});
        for (const auto& layer : model->children()) {
          const auto& linear = *layer->as<torch::nn::Linear>();
          sum = sum + (linear.weight * 0.7).sum() + (linear.bias * 0.4).sum();
        }
        return sum;
      };
      loss().backward();
      const auto sent = sums_over_replicas(mesh);
      if (fails) {
        // Older than the layers' operators, so that it comes behind them.
        auto last = torch::ones({}, torch::requires_grad()) * 1;
        last.register_hook([](const Tensor&) -> Tensor { TORCH_CHECK(false, "no"); });
        EXPECT_ANY_THROW((loss() + last).backward());
        EXPECT_GT(sums_over_replicas(mesh), sent);
      }
      model->zero_grad();
      loss().backward();
      return full_gradient(model->parameters().back());
    };
    EXPECT_TRUE(steps(false).equal(steps(true)));
  });
}

// Whole numbers of gradients 1.4: a step sends 1 and leaves 0.4.
std::vector<Tensor> of_1_4(const torch::nn::Linear& layer) {
  return {torch::full_like(layer->weight, 1.4), torch::full_like(layer->bias, 1.4)};
}

// What three backwards lose that are published together all comes later.
TEST_P(ReplicaCodes, BackwardsThatArePublishedTogetherLoseNothing) {
  run_ranks(replicas() * shards(), [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, GetParam().mesh);
    auto layer = make_linear(16, 8);
    auto unit = fully_shard(
        layer, mesh,
        with({.replicas = whole_numbers(), .error_feedback = true}, {.outer = GetParam().outer}));
    unit.set_gradient_divide_factor(static_cast<double>(replicas() * shards()));
    auto gradients = of_1_4(layer);
    for (auto& each : gradients) each /= static_cast<double>(shards());
    for (int round = 0; round < 3; ++round) {
      for (int backward = 0; backward < 3; ++backward) {
        unit.set_is_last_backward(backward == 2);
        backward_on(layer, gradients);
      }
    }
    // 9 * 1.4 = 12.6 for each replica, of which less than what 3 backwards lose is on its
    // way.
    const auto sum = full_gradient(layer->parameters()[0]) * static_cast<double>(shards());
    EXPECT_LT((sum - 12.6).abs().max().item<float>(), 1.6f) << sum;
    EXPECT_GT(sum.min().item<float>(), 9.5f) << "more than without feedback, 9";
  });
}

// Parameters of two dtypes, and then others that are trained: what was lost of some is
// never added to others.
TEST_P(ReplicaCodes, ErrorFeedbackIsOfTheSameParameters) {
  run_ranks(replicas() * shards(), [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, GetParam().mesh);
    struct Two : torch::nn::Module {
      Two() {
        one = register_parameter("one", torch::zeros({12}));
        half = register_parameter("half", torch::zeros({12}, at::kBFloat16));
        other = register_parameter("other", torch::zeros({12}), /*requires_grad=*/false);
      }
      Tensor one, half, other;
    };
    auto two = std::make_shared<Two>();
    fully_shard(
        two, mesh,
        with({.replicas = whole_numbers(), .error_feedback = true}, {.outer = GetParam().outer}));
    const auto share = 1.0 / static_cast<double>(shards());
    auto of_one = torch::zeros({12}), of_half = torch::zeros({12});
    constexpr int kSteps = 21;  // after which something is lost of both
    for (int step = 0; step < kSteps; ++step) {
      two->zero_grad();
      ((two->one * 1.25 * share).sum() + (two->half * 2.5 * share).sum().to(at::kFloat)).backward();
      of_one += full_gradient(two->parameters()[0]) * static_cast<double>(shards());
      of_half += full_gradient(two->parameters()[1]).to(at::kFloat) * static_cast<double>(shards());
    }
    EXPECT_LT((of_one / kSteps - 1.25).abs().max().item<float>(), 0.06f) << of_one;
    EXPECT_LT((of_half / kSteps - 2.5).abs().max().item<float>(), 0.06f) << of_half;
    two->parameters()[0].set_requires_grad(false);
    two->parameters()[2].set_requires_grad(true);
    two->zero_grad();
    (two->other * 7.4 * share).sum().backward();  // 8 with what was lost
    EXPECT_TRUE(full_gradient(two->parameters()[2]).equal(torch::full({12}, 7 * share)));
  });
}

// What was lost before a step that overflows comes after it, in the row with the
// infinity:
// 1.4 are 1 and leave 0.4, with which 0.2 are 1 later.
TEST_P(ReplicaCodes, GradientsThatAreNotFiniteLeaveTheResidual) {
  run_ranks(replicas() * shards(), [&](int64_t) {
    const auto mesh = init_device_mesh(torch::kCPU, GetParam().mesh);
    auto layer = make_linear(16, 8);
    fully_shard(
        layer, mesh,
        with({.replicas = whole_numbers(), .error_feedback = true}, {.outer = GetParam().outer}));
    const auto step = [&](double gradient, double of_first) {
      layer->zero_grad();
      const auto share = 1.0 / static_cast<double>(shards());
      auto weight = torch::full({8, 16}, gradient * share);
      weight[0][0] = of_first * share;
      backward_on(layer, {weight, torch::full({8}, gradient * share)});
    };
    step(1.4, 1.4);
    step(0.3, std::numeric_limits<double>::infinity());
    step(0.2, 0.2);
    const auto sums = full_gradient(layer->parameters()[0]) * static_cast<double>(shards());
    EXPECT_EQ(sums[0][0].item<float>(), 1.0f) << sums;
    EXPECT_EQ(sums.max().item<float>(), 1.0f) << sums;
  });
}

// The ranks that have the same shards as rank 0.
TEST_P(ReplicaCodes, OneThatThrowsOnOneRankIsTheErrorOfAllThatWaitForIt) {
  run_ranks(replicas() * shards(), [&](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, GetParam().mesh);
    auto fails = std::make_shared<bool>(false);
    auto codec = std::make_shared<GatherCodec>(*whole_numbers());
    codec->encode = [fails](const Tensor& values, const Tensor& codes) {
      TORCH_CHECK(!*fails, "out of dictionary");
      whole_numbers()->encode(values, codes);
    };
    auto layer = make_linear(16, 8);
    fully_shard(layer, mesh, with({.replicas = codec}, {.outer = GetParam().outer}));
    const auto gradients = gradients_of_rank(layer, rank);
    *fails = rank == 0;
    if (rank % shards() != 0) return backward_on(layer, gradients);  // waits for other ranks
    EXPECT_THAT(message_of([&] { backward_on(layer, gradients); }),
                AllOf(HasSubstr("on rank 0 codec 'whole numbers' failed to encode gradients"),
                      HasSubstr("out of dictionary"), HasSubstr("unit")));
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, ReplicaCodes,
                         ::testing::Values(Replicated{{2, 1}, Outer::kReplicate},
                                           Replicated{{2, 2}, Outer::kReplicate},
                                           Replicated{{3, 1}, Outer::kReplicate},
                                           Replicated{{2, 2}, Outer::kShardOptimizer},
                                           Replicated{{3, 2}, Outer::kShardOptimizer}),
                         [](const auto& info) {
                           return std::to_string(info.param.mesh[0]) + "x" +
                                  std::to_string(info.param.mesh[1]) +
                                  (info.param.outer == Outer::kReplicate ? "hsdp" : "hfsdp");
                         });

TEST(GradientCodecMistakes, AreRefused) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    const auto refused = [&](const GradientCodecs& codecs, const auto& matcher) {
      expect_error<c10::ValueError>([&] { fully_shard(layer, mesh, with(codecs)); }, matcher);
      EXPECT_FALSE(is_fsdp_module(layer));
    };
    refused({.error_feedback = true}, HasSubstr("error_feedback is set without"));
    refused({.shards = std::make_shared<GatherCodec>()}, HasSubstr("gradient_codecs.shards"));
    auto wide = std::make_shared<GatherCodec>(*bfloat16_codec());
    wide->row_bytes = [](int64_t n) { return 4 * n; };
    refused({.replicas = wide}, AllOf(HasSubstr("gradient_codecs.replicas is 'two bytes'"),
                                      HasSubstr("takes 16384 bytes"), HasSubstr("(rank 0)")));
    auto unit = fully_shard(layer, mesh, with({.shards = mxint8()}));
    expect_error<c10::ValueError>(
        [&] { unit.set_custom_reduce_scatter([](const auto&, const auto&) { return nullptr; }); },
        HasSubstr("travel as codes"));
  });
}

TEST(GradientCodecMistakes, OtherCodecsOnOneRankAreAnError) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    auto layer = make_linear(64, 8);
    fully_shard(layer, mesh, with({.shards = rank == 0 ? mxint8() : mxfp8()}));
    const auto told = message_of([&] { layer(torch::ones({1, 64})).sum().backward(); });
    EXPECT_THAT(told, AllOf(HasSubstr("reduce-scatter"), HasSubstr("rank")));
  });
}

TEST(GradientCodecMistakes, OneThatThrowsOnOneRankIsEveryRanksErrorAndTheNextStepIsClean) {
  run_ranks(3, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {3});
    auto fails = std::make_shared<bool>(rank == 2);
    auto codec = std::make_shared<GatherCodec>(*marked_codec());
    codec->encode = [fails](const Tensor& values, const Tensor& codes) {
      TORCH_CHECK(!*fails, "out of dictionary");
      marked_codec()->encode(values, codes);
    };
    auto layer = make_linear(64, 8);
    fully_shard(layer, mesh, with({.shards = codec}));
    const std::vector<Tensor> ones = {torch::ones({8, 64}), torch::ones({8})};
    EXPECT_THAT(message_of([&] { backward_on(layer, ones); }),
                AllOf(HasSubstr("gradients of unit '"), HasSubstr("were not reduced: on rank 2"),
                      HasSubstr("codec 'two bytes' failed to encode gradients"),
                      HasSubstr("out of dictionary")));
    *fails = false;
    layer->zero_grad();
    backward_on(layer, ones);
    EXPECT_TRUE(full_gradient(layer->parameters()[0]).equal(ones[0]));
  });
}

TEST(GradientCodecMistakes, OneThatCanNotDecodeIsThatRanksErrorAndTheNextStepIsClean) {
  run_ranks(3, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {3});
    auto fails = std::make_shared<bool>(rank == 1);
    auto codec = std::make_shared<GatherCodec>(*bfloat16_codec());
    codec->decode = [fails](const Tensor& codes, const Tensor& values) {
      TORCH_CHECK(!*fails, "no key");
      bfloat16_codec()->decode(codes, values);
    };
    auto layer = make_linear(64, 8);
    fully_shard(layer, mesh, with({.shards = codec}));
    const std::vector<Tensor> ones = {torch::ones({8, 64}), torch::ones({8})};
    const auto told = message_of([&] { backward_on(layer, ones); });
    if (rank == 1) {
      EXPECT_THAT(told, AllOf(HasSubstr("gradients of unit '"), HasSubstr("no key"),
                              HasSubstr("codec 'two bytes' failed to decode gradients")));
    } else {
      EXPECT_EQ(told, "nothing was thrown");
    }
    *fails = false;
    layer->zero_grad();
    backward_on(layer, ones);
    EXPECT_TRUE(full_gradient(layer->parameters()[0]).equal(ones[0]));
  });
}

}  // namespace
}  // namespace fsdp::testing
