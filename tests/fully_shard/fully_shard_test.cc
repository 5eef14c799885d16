#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/gradient_bound.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/warnings.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <c10/util/accumulate.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

class Training : public Worlds {};

TEST_P(Training, ADecoderOfUnitsHasTheUnshardedNumbers) {
  expect_parity(
      world(), [] { return decoder_model(8, 3); }, shard_decoder, "decoder");
}

TEST_P(Training, UnevenAndEmptyShardsHaveTheUnshardedNumbers) {
  const auto build = []() -> Model {
    auto model =
        torch::nn::Sequential(torch::nn::Linear(16, 5), torch::nn::ReLU(), torch::nn::Linear(5, 1));
    return {model.ptr(),
            [model](const Data& data) mutable { return model->forward(data.x).pow(2).sum(); }};
  };
  expect_parity(world(), build, shard_children, "uneven");
}

TEST_P(Training, CollectiveCountsAreTheseFromTheFirstStepOn) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    constexpr int64_t blocks = 4;
    auto model = build_seeded([] { return decoder_model(8, blocks); });
    shard_decoder(*model.module, mesh);
    torch::optim::AdamW optimizer(model.module->parameters(), 1e-3);
    for (int step = 0; step < 4; ++step) {
      const auto before = counters(mesh);
      model.loss(make_data(5)).backward();
      optimizer.step();
      optimizer.zero_grad();
      const auto after = counters(mesh);
      // Embedding 1, blocks 2 each, head 1, root 1; every unit reduces once. The root,
      // which is kept after forward, is still there where an evaluation came before (of
      // steps 1 and on).
      const int64_t gathers = 2 * blocks + (step < 2 ? 3 : 2);
      EXPECT_EQ(after.all_gathers - before.all_gathers, world() == 1 ? 0 : gathers)
          << "step " << step;
      EXPECT_EQ(after.reduce_scatters - before.reduce_scatters, world() == 1 ? 0 : blocks + 3)
          << "step " << step;
      torch::NoGradGuard no_grad;  // evaluation in between changes nothing else
      for (int i = 0; i < step; ++i) model.loss(make_data(6));
      auto token =
          make_data(7).index.slice(1, 0, 1);  // and so does generation, one token after another
      for (int i = 0; i < 2 * step; ++i)
        token = dynamic_cast<DecoderImpl&>(*model.module).forward(token).argmax(-1);
    }
  });
}

TEST_P(Training, OnACpuMeshWarnsOfNothing) {
  const c10::WarningUtils::WarnAlways always;
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto model = build_seeded([] { return decoder_model(8, 1); });
    Warnings warnings;
    shard_decoder(*model.module, mesh);
    EXPECT_THAT(warnings.texts(), ::testing::IsEmpty()) << "fully_shard";
    model.loss(make_data(5)).backward();
    EXPECT_THAT(warnings.texts(), ::testing::IsEmpty()) << "a step";
  });
}

// Of unsharded parameters of these shapes, float32, as docs/design/memory.md has it:
// every rank's part is as long as the longest and begins at a multiple of 64 bytes.
int64_t padded_bytes(const std::vector<std::vector<int64_t>>& shapes, int64_t ranks) {
  int64_t bytes = 0;
  for (const auto& shape : shapes) {
    const int64_t rows = (shape[0] + ranks - 1) / ranks;
    const int64_t part = rows * c10::multiply_integers(shape) / shape[0] * 4;
    bytes += ranks * ((part + 63) / 64 * 64);
  }
  return bytes;
}

// By FSDP_PEER_MEMORY: what a step holds at most, but for shards and sharded gradients.
int64_t formula(const std::string& setting, int64_t block, int64_t root, int64_t ranks) {
  if (setting == "on") return root + 2 * block;
  if (setting == "copy") return 2 * root + 3 * block;
  return 2 * root + 4 * block + block / ranks;
}

TEST_P(Training, MemoryIsThatOfTheFormula) {
  for (const std::string setting : {"on", "copy", "off"}) {
    const WithEnvironment memory("FSDP_PEER_MEMORY", setting);
    on_ranks([&](int64_t, const DeviceMesh& mesh) {
      const auto block = padded_bytes({{64}, {64}, {128, 64}, {128}, {64, 128}, {64}}, world());
      const auto bytes = formula(setting, block, padded_bytes({{64}, {64}}, world()), world());
      for (const int64_t blocks : {4, 32}) {
        auto model = build_seeded([blocks] { return decoder_model(64, blocks); });
        shard_decoder(*model.module, mesh);
        for (int step = 0; step < 3; ++step) {
          SCOPED_TRACE(setting + ", " + std::to_string(blocks) + " blocks, step " +
                       std::to_string(step));
          reset_peak(mesh);
          model.loss(make_data(5)).backward();
          const auto held = static_cast<double>(counters(mesh).peak_bytes);
          if (world() == 1) {  // borrows the shards
            EXPECT_EQ(held, 0);
          } else {
            EXPECT_NEAR(held, static_cast<double>(bytes), 0.03 * static_cast<double>(bytes));
          }
          EXPECT_EQ(resident_bytes(counters(mesh)), 0);
          EXPECT_EQ(counters(mesh).staging_bytes, 0);
          EXPECT_EQ(counters(mesh).gradient_bytes, 0);
        }
      }
    });
  }
}

TEST_P(Training, AccumulationWithoutSynchronisationEqualsTheSum) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(8, 2); });
    auto sharded = build_seeded([] { return decoder_model(8, 2); });
    shard_decoder(*sharded.module, mesh);
    const auto data = [](int64_t step, int64_t r) {
      return make_data(static_cast<uint64_t>(10 * step + r));
    };
    {
      NoSyncGuard no_sync(get_fsdp_module(*sharded.module));
      sharded.loss(data(0, rank)).backward();
      for (const auto& parameter : sharded.module->parameters())
        EXPECT_FALSE(parameter.grad().defined());
    }
    sharded.loss(data(1, rank)).backward();
    ExpectedGradients expected;
    for (int64_t r = 0; r < world(); ++r) {
      const auto first = gradients_of(plain, data(0, r)), second = gradients_of(plain, data(1, r));
      for (size_t i = 0; i < first.size(); ++i) {
        if (r == 0) {
          expected.mean.push_back(first[i] + second[i]);
          expected.bound.push_back(first[i].abs() + second[i].abs());
        } else {
          expected.mean[i] = expected.mean[i] + (first[i] + second[i]);
          expected.bound[i] = expected.bound[i] + first[i].abs() + second[i].abs();
        }
      }
    }
    for (auto& mean : expected.mean) mean.div_(world());
    for (auto& bound : expected.bound) bound = gradient_bound(bound, 4);
    expect_gradients(*sharded.module, expected, world(), "accumulated");
  });
}

TEST_P(Training, FrozenParametersHaveNoGradientAndMayBeUnfrozenLater) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(8, 2); });
    auto sharded = build_seeded([] { return decoder_model(8, 2); });
    const auto freeze = [](torch::nn::Module& module, bool frozen) {
      for (auto& item : module.named_parameters()) {
        if (item.key().find("block0") != std::string::npos) item.value().set_requires_grad(!frozen);
      }
    };
    freeze(*plain.module, true);
    freeze(*sharded.module, true);
    shard_decoder(*sharded.module, mesh);
    for (const bool frozen : {true, false, true}) {
      freeze(*plain.module, frozen);
      freeze(*sharded.module, frozen);
      const auto expected = expected_gradients(plain, world(), 4);
      sharded.module->zero_grad();
      sharded.loss(make_data(407 + static_cast<uint64_t>(rank))).backward();
      expect_gradients(*sharded.module, expected, world(), frozen ? "frozen" : "unfrozen");
    }
  });
}

struct Projection : torch::nn::Module {
  explicit Projection(torch::Tensor shared)
      : weight(register_parameter("weight", std::move(shared))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x.matmul(weight.t()); }
  torch::Tensor weight;
};

struct TiedModel : torch::nn::Module {
  torch::nn::Embedding in = register_module("in", torch::nn::Embedding(10, 6));
  std::shared_ptr<Projection> out =
      register_module("out", std::make_shared<Projection>(in->weight));
};

TEST_P(Training, ParametersTiedWithinAndAcrossUnitsStayTied) {
  const auto build = []() -> Model {
    auto model = std::make_shared<TiedModel>();
    return {model, [model](const Data& data) {
              return model->out->forward(model->in(data.index)).pow(2).sum();
            }};
  };
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    for (const auto& shard : {ShardModel(shard_whole), ShardModel(shard_children)}) {
      auto plain = build_seeded(build);
      auto sharded = build_seeded(build);
      shard(*sharded.module, mesh);
      const auto named = sharded.module->named_parameters();
      ASSERT_EQ(named.size(), 2u);
      EXPECT_TRUE(named["in.weight"].is_same(named["out.weight"]));
      const auto expected = expected_gradients(plain, world(), 4);
      sharded.loss(make_data(407 + static_cast<uint64_t>(rank))).backward();
      expect_gradients(*sharded.module, expected, world(), "tied");
    }
  });
}

TEST_P(Training, ATiedParameterIsOneTensorInEveryState) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const auto model = std::make_shared<TiedModel>();
    const torch::NoGradGuard no_grad;
    model->in->weight.copy_(torch::linspace(-1, 1, 60).view({10, 6}));
    fully_shard(*model, mesh);
    const auto expect_one = [&model] {
      const auto named = model->named_parameters();
      EXPECT_TRUE(named["in.weight"].is_same(named["out.weight"]));
      EXPECT_TRUE(model->in->weight.is_same(model->out->weight));
    };
    expect_one();
    for (const SummonOptions& options : {SummonOptions{}, SummonOptions{.offload_to_cpu = true}}) {
      const SummonFullParams full(*model, options);
      expect_one();
    }
    model->in->weight.mul_(2);
    expect_one();
    model->named_parameters()["out.weight"].mul_(2);
    expect_one();
  });
}

TEST_P(Training, AnExceptionInForwardOrBackwardIsFollowedByACleanStep) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(8, 3); });
    auto sharded = build_seeded([] { return decoder_model(8, 3); });
    shard_decoder(*sharded.module, mesh);
    auto& model = dynamic_cast<DecoderImpl&>(*sharded.module);
    const auto mine = make_data(407 + static_cast<uint64_t>(rank));
    EXPECT_THROW(
        {
          auto x = model.embedding(mine.index);
          x = model.blocks[0](x);
          throw std::runtime_error("in forward");
        },
        std::runtime_error);
    auto x = model.embedding(mine.index);
    for (auto& block : model.blocks) x = block(x);
    x.register_hook([](const torch::Tensor&) { throw std::runtime_error("in backward"); });
    EXPECT_THROW(model.head(model.norm(x)).sum().backward(), std::exception);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    sharded.module->zero_grad();
    const auto expected = expected_gradients(plain, world(), 4);
    sharded.loss(mine).backward();
    expect_gradients(*sharded.module, expected, world(), "after failures");
  });
}

TEST_P(Training, BackwardThroughAGraphOlderThanTheOptimizerStepIsAnError) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = build_seeded([] { return decoder_model(8, 2); });
    shard_decoder(*model.module, mesh);
    torch::optim::SGD optimizer(model.module->parameters(), 0.1);
    model.loss(make_data(1)).backward();
    const auto stale = model.loss(make_data(2));
    optimizer.step();
    // The head's weight was saved: the error is autograd's, as of the plain model.
    EXPECT_THAT(message_of<c10::Error>([&] { stale.backward(); }),
                HasSubstr("modified by an inplace operation"));
    optimizer.zero_grad();
    EXPECT_NO_THROW(model.loss(make_data(3)).backward());
  });
}

TEST_P(Training, ClippingEqualsTheUnshardedNorm) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    for (const double p : {0.5, 1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      auto plain = build_seeded([] { return decoder_model(8, 2); });
      auto sharded = build_seeded([] { return decoder_model(8, 2); });
      shard_decoder(*sharded.module, mesh);
      plain.loss(make_data(9)).backward();
      sharded.loss(make_data(9)).backward();
      const auto expected = torch::nn::utils::clip_grad_norm_(plain.module->parameters(), 0.01, p);
      const auto norm = clip_grad_norm_(sharded.module->parameters(), 0.01, p);
      EXPECT_FALSE(is_dtensor(norm));
      EXPECT_NEAR(norm.item<double>(), expected, 1e-5 * expected) << "p = " << p;
      for (size_t i = 0; i < plain.module->parameters().size(); ++i) {
        const auto clipped = DTensor(sharded.module->parameters()[i].grad()).full_tensor();
        EXPECT_TRUE(torch::allclose(clipped, plain.module->parameters()[i].grad(), 1e-4, 1e-8))
            << "p = " << p;
      }
    }
  });
}

TEST_P(Training, InferenceFirstThenTraining) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(8, 2); });
    auto sharded = build_seeded([] { return decoder_model(8, 2); });
    shard_decoder(*sharded.module, mesh);
    const auto mine = make_data(407 + static_cast<uint64_t>(rank));
    torch::Tensor inferred;
    {
      c10::InferenceMode inference;
      inferred = sharded.loss(mine);
    }
    const auto expected = expected_gradients(plain, world(), 4);
    const auto loss = sharded.loss(mine);
    EXPECT_EQ(loss.item<float>(), inferred.item<float>());
    loss.backward();
    expect_gradients(*sharded.module, expected, world(), "after inference");
  });
}

TEST_P(Training, ModelsThatDieLeaveNothingBehind) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto witness = std::make_shared<torch::nn::LinearImpl>(2, 2);  // keeps the counters
    fully_shard(*witness, mesh);
    const auto before = counters(mesh).sharded_bytes;
    for (int i = 0; i < 20; ++i) {
      auto model = build_seeded([] { return decoder_model(8, 2); });
      shard_decoder(*model.module, mesh);
      const auto loss = model.loss(make_data(1));
      if (i % 2 == 0) model = {};  // a graph may outlive its module
      loss.backward();
    }
    EXPECT_EQ(counters(mesh).sharded_bytes, before);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
  });
}

INSTANTIATE_WORLDS(Training, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
