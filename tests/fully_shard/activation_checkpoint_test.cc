// fsdp::checkpoint: the numbers of the plain call, less memory, no gather beyond those of
// the second run, and one reduction of each unit.
#include "fully_shard/activation_checkpoint.h"

#include "dtensor/manual_seed.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <ATen/autocast_mode.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

class ActivationCheckpoint : public Worlds {};

Tensor checkpointed_loss(Decoder& model, const Data& data) {
  auto x = model->embedding(data.index);
  for (auto& block : model->blocks) x = checkpoint(block, x);
  return model->head(model->norm(x)).pow(2).mean();
}

Decoder sharded_decoder(const DeviceMesh& mesh) {
  Decoder model{nullptr};
  build_seeded([&model] {
    model = Decoder(6, 3);
    return Model{model.ptr(), {}};
  });
  shard_decoder(*model, mesh);
  return model;
}

TEST_P(ActivationCheckpoint, OfEveryBlockHasTheNumbersOfThePlainModel) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto plain = sharded_decoder(mesh), saving = sharded_decoder(mesh);
    for (const uint64_t seed : {1, 2}) {
      const auto expected = loss_of(plain, make_data(seed));
      const auto loss = checkpointed_loss(saving, make_data(seed));
      EXPECT_TRUE(torch::equal(loss, expected));
      expected.backward();
      loss.backward();
      for (size_t i = 0; i < plain->parameters().size(); ++i) {
        EXPECT_TRUE(torch::equal(full_gradient(saving->parameters()[i]),
                                 full_gradient(plain->parameters()[i])))
            << i;
      }
    }
  });
}

TEST_P(ActivationCheckpoint, TakesASharedPointerToAModule) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded_decoder(mesh);
    const auto x = model->embedding(make_data(1).index);
    auto& block = model->blocks.front();
    EXPECT_TRUE(torch::equal(checkpoint(block.ptr(), x), block->forward(x)));
  });
}

TEST_P(ActivationCheckpoint, GathersAUnitOnceInForwardAndOnceWhenItRunsAgain) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = sharded_decoder(mesh);
    const auto gathers = [&](const std::function<void()>& body) {
      const auto before = counters(mesh).all_gathers;
      body();
      return counters(mesh).all_gathers - before;
    };
    checkpointed_loss(model, make_data(1)).backward();
    Tensor loss;
    const auto forward = gathers([&] { loss = checkpointed_loss(model, make_data(1)); });
    const auto backward = gathers([&] { loss.backward(); });
    const int64_t blocks = 3;
    EXPECT_EQ(forward, world() == 1 ? 0 : blocks + 3) << "embedding, head and root once";
    EXPECT_EQ(backward, world() == 1 ? 0 : blocks);
  });
}

TEST_P(ActivationCheckpoint, KeepsNothingBetweenForwardAndBackward) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4);
    fully_shard(layer, mesh);
    c10::weak_intrusive_ptr<c10::StorageImpl> inner{
        torch::empty({1}).storage().getWeakStorageImpl()};
    int runs = 0;
    auto y = checkpoint(
        [&](const Tensor& x) {
          ++runs;
          const auto hidden = torch::sigmoid(layer(x));  // saved by its own backward
          inner = hidden.storage().getWeakStorageImpl();
          return hidden * hidden;
        },
        torch::ones({2, 4}));
    EXPECT_EQ(runs, 1);
    EXPECT_TRUE(inner.expired());
    y.sum().backward();
    EXPECT_EQ(runs, 2);
  });
}

TEST_P(ActivationCheckpoint, TakesAndGivesSeveralTensorsNestedAndWithoutGradients) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 4), plain = make_linear(4, 4);
    fully_shard(layer, mesh);
    const auto region = [](torch::nn::Linear& used) {
      return [&used](const Tensor& x, const Tensor& mask) {
        const auto inner = checkpoint([&](const Tensor& z) { return torch::tanh(used(z)); }, x);
        return std::make_tuple(inner * mask, mask.argmax(), used(inner).sum());
      };
    };
    auto x = torch::ones({2, 4}, torch::requires_grad()), y = x.detach().requires_grad_();
    const auto mask = torch::eye(4).slice(0, 0, 2);
    const auto [a, index, b] = checkpoint(region(layer), x, mask);
    const auto [c, plain_index, d] = region(plain)(y, mask);
    EXPECT_TRUE(torch::equal(index, plain_index));
    (a.sum() + b).backward();
    (c.sum() + d).backward();
    EXPECT_TRUE(torch::equal(x.grad(), y.grad()));
    EXPECT_TRUE(torch::allclose(full_gradient(layer->parameters()[0]), plain->weight.grad()));
  });
}

// As torch.autocast does, only around the forward, and what was cast is forgotten after
// it. The steps are so large that each one shows in the next loss. Gives the losses.
std::vector<double> train_in_autocast(const std::vector<torch::nn::Linear>& layers, bool saves) {
  std::vector<Tensor> parameters;
  for (const auto& layer : layers)
    for (const auto& parameter : layer->parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, 2.0);
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    auto x = torch::linspace(-1, 1, 24).view({4, 6});
    for (const auto& layer : layers) {
      const auto region = [&layer](const Tensor& in) {  // autocast keeps casts of whole leaves
        return torch::tanh(torch::linear(in, layer->weight, layer->bias));
      };
      x = saves ? checkpoint(region, x) : region(x);
    }
    const auto loss = x.to(at::kFloat).pow(2).sum();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    EXPECT_EQ(x.scalar_type(), at::kBFloat16);
    losses.push_back(loss.item<double>());
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
  return losses;
}

TEST_P(ActivationCheckpoint, TrainsUnderAutocastAsThePlainModel) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    std::vector<torch::nn::Linear> plain, saving;
    for (auto* layers : {&plain, &saving}) {
      for (int i = 0; i < 3; ++i) fully_shard(layers->emplace_back(make_linear(6, 6)), mesh);
    }
    const auto expected = train_in_autocast(plain, /*saves=*/false);
    EXPECT_EQ(train_in_autocast(saving, /*saves=*/true), expected);
    EXPECT_NE(expected[0], expected[1]);
    EXPECT_NE(expected[1], expected[2]);
    for (size_t i = 0; i < plain.size(); ++i) {
      for (const size_t j : {0, 1})
        EXPECT_TRUE(torch::equal(full_value(saving[i]->parameters()[j]),
                                 full_value(plain[i]->parameters()[j])))
            << "layer " << i << ", parameter " << j;
    }
  });
}

// What a network of one layer with dropout gives: its output, the gradient of its input,
// and the numbers drawn after the forward and after the backward.
std::vector<Tensor> run_with_dropout(torch::nn::Linear& layer, bool saves) {
  const auto drop = [&layer](const Tensor& in) {
    return torch::dropout(layer(torch::rand_like(in) * in), 0.5, true);
  };
  const auto x = torch::ones({8, 6}, torch::requires_grad());
  const auto y = saves ? checkpoint(drop, x) : drop(x);
  const auto after_forward = torch::rand({3});
  y.sum().backward();
  return {y.detach(), x.grad(), after_forward, torch::rand({3})};
}

TEST_P(ActivationCheckpoint, RunsAgainWithTheGeneratorOfManualSeed) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto plain = make_linear(6, 6), saving = make_linear(6, 6);
    for (auto* layer : {&plain, &saving}) fully_shard(*layer, mesh);
    const uint64_t seed = 5 + static_cast<uint64_t>(rank);  // data parallel: masks differ
    manual_seed(seed, mesh);
    const auto expected = run_with_dropout(plain, /*saves=*/false);
    manual_seed(seed, mesh);
    const auto found = run_with_dropout(saving, /*saves=*/true);
    use_default_generator();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
    EXPECT_TRUE(
        full_gradient(saving->parameters()[0]).equal(full_gradient(plain->parameters()[0])));
  });
}

TEST_P(ActivationCheckpoint, RunsAgainWithTheGeneratorThatItHad) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    manual_seed(5, mesh);
    const auto x = torch::ones({100}, torch::requires_grad());
    const auto y = checkpoint([](const Tensor& in) { return torch::dropout(in, 0.5, true); }, x);
    manual_seed(6, mesh);
    const auto next = torch::rand({6});
    manual_seed(6, mesh);
    EXPECT_TRUE(torch::rand({3}).equal(next.slice(0, 0, 3)));
    y.sum().backward();
    EXPECT_TRUE(x.grad().equal(y.detach())) << "the mask of the first run";
    EXPECT_TRUE(torch::rand({3}).equal(next.slice(0, 3)));
    use_default_generator();
  });
}

INSTANTIATE_WORLDS(ActivationCheckpoint, 1, 2, 3);

TEST(ActivationCheckpointAlone, RunsAgainWithTheSameRandomNumbersAndLeavesTheLaterOnes) {
  const auto x = torch::ones({1000}, torch::requires_grad());
  torch::manual_seed(3);
  const auto y = checkpoint([&](const Tensor& in) { return torch::dropout(in, 0.5, true); }, x);
  const auto next = torch::rand({3});
  torch::manual_seed(3);
  torch::dropout(torch::ones({1000}), 0.5, true);
  EXPECT_TRUE(torch::equal(torch::rand({3}), next));
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  y.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), y.detach())) << "the mask of the first run";
  EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), state));
}

TEST(ActivationCheckpointAlone, DrawsOtherNumbersIfTheStateIsNotPreserved) {
  const auto x = torch::ones({1000}, torch::requires_grad());
  const auto drop = [](const Tensor& in) { return torch::dropout(in, 0.5, true); };
  torch::manual_seed(3);
  const auto y = checkpoint({.preserve_rng_state = false}, drop, x);
  y.sum().backward();
  torch::manual_seed(3);
  EXPECT_TRUE(drop(torch::ones({1000})).equal(y.detach()));
  EXPECT_TRUE(drop(torch::ones({1000})).equal(x.grad())) << "the mask that came next";
}

TEST(ActivationCheckpointAlone, TakesOptionsBeforeARegionAndAModule) {
  const CheckpointOptions options = {.preserve_rng_state = false};
  const torch::nn::Linear layer(3, 3);
  const auto x = torch::ones({2, 3});
  const auto expected = torch::nn::Linear(layer)(x);
  EXPECT_TRUE(checkpoint(options, layer, x).equal(expected));
  EXPECT_TRUE(checkpoint(options, layer.ptr(), x).equal(expected));
  EXPECT_TRUE(checkpoint({.preserve_rng_state = true}, layer.ptr(), x).equal(expected));
  EXPECT_TRUE(checkpoint(options, [&] {
                return torch::linear(x, layer->weight, layer->bias);
              }).equal(expected));
}

TEST(ActivationCheckpointAlone, RunsAgainUnderTheSameAutocast) {
  const auto weight = torch::ones({4, 4}, torch::requires_grad());
  std::vector<at::ScalarType> seen;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto y = checkpoint(
      [&](const Tensor& x) {
        auto out = torch::mm(x, weight);
        seen.push_back(out.scalar_type());
        return out;
      },
      torch::ones({2, 4}));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  y.sum().backward();
  EXPECT_EQ(seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16}));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(ActivationCheckpointAlone, IsThePlainCallWhereNoGradientsAreRecorded) {
  torch::NoGradGuard no_grad;
  int runs = 0;
  const auto y = checkpoint(
      [&](const Tensor& x) {
        ++runs;
        return x * 2;
      },
      torch::ones({2}));
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(y.requires_grad());
}

TEST(ActivationCheckpointAlone, RefusesWhatWouldGiveWrongGradients) {
  const auto square = [](const Tensor& x) { return x * x; };
  auto x = torch::ones({2}, torch::requires_grad());
  const auto sum = [&] { return checkpoint(square, x).sum(); };
  EXPECT_THAT(message_of([&] { torch::autograd::grad({sum()}, {x}); }),
              HasSubstr("autograd::grad"));
  EXPECT_THAT(message_of([&] { sum().backward({}, true, /*create_graph=*/true); }),
              HasSubstr("create_graph"));
  const auto twice = sum();
  twice.backward();
  EXPECT_THAT(message_of([&] { twice.backward(); }), HasSubstr("second time"));
  auto input = x * 1;
  const auto written = checkpoint(square, input).sum();
  input.detach().add_(1);
  EXPECT_THAT(message_of([&] { written.backward(); }), HasSubstr("modified by an inplace"));
  int runs = 0;
  const auto fickle = checkpoint(
      [&](const Tensor& in) { return std::vector<Tensor>(static_cast<size_t>(++runs), in * 2); },
      x);
  EXPECT_THAT(message_of([&] { fickle.front().sum().backward(); }),
              HasSubstr("1 outputs in forward and 2"));
}

TEST(ActivationCheckpointAlone, AnExceptionWhenTheRegionRunsAgainReachesTheCaller) {
  int runs = 0;
  auto x = torch::ones({2}, torch::requires_grad());
  const auto y = checkpoint(
      [&](const Tensor& in) {
        TORCH_CHECK(++runs == 1, "the second run fails");
        return in * 2;
      },
      x);
  EXPECT_THAT(message_of([&] { y.sum().backward(); }), HasSubstr("the second run fails"));
}

class CheckpointedReductions : public Worlds {};

// The embedding is used first and its gradient comes last; the blocks between it and the
// head are in regions of `blocks_per_region`.
Tensor loss_in_regions(Decoder& model, const Data& data, size_t blocks_per_region) {
  auto x = model->embedding(data.index);
  for (size_t first = 0; first < model->blocks.size(); first += blocks_per_region) {
    const auto region = [&model, first, blocks_per_region](const Tensor& input) {
      auto y = input;
      for (size_t i = first; i < first + blocks_per_region; ++i) y = model->blocks.at(i)(y);
      return y;
    };
    x = checkpoint(region, x);
  }
  return model->head(model->norm(x)).pow(2).mean();
}

// So every unit is reduced exactly once: there are as many reductions as units, and no
// gradient is missing or wrong.
TEST_P(CheckpointedReductions, LeaveOncePerUnitAndStepAndNoneIsLate) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    const auto mine = make_data(20 + static_cast<uint64_t>(rank));
    for (const size_t blocks_per_region : {1, 2}) {
      MeasuredDecoder plain(mesh), saving(mesh);
      for (int step = 0; step < 3; ++step) {
        SCOPED_TRACE(c10::str(blocks_per_region, " blocks per region, step ", step));
        loss_of(plain.model, mine).backward();
        const auto before = counters(mesh);
        loss_in_regions(saving.model, mine, blocks_per_region).backward();
        const auto after = counters(mesh);
        EXPECT_EQ(after.reduce_scatters - before.reduce_scatters, kUnits);
        EXPECT_EQ(after.late_reduce_scatters - before.late_reduce_scatters, 0);
        EXPECT_EQ(after.gradient_bytes, 0);
        EXPECT_EQ(resident_bytes(after), 0);
        const auto expected = plain.model->parameters(), actual = saving.model->parameters();
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_TRUE(actual[i].grad().defined()) << i;
          EXPECT_TRUE(torch::equal(full_gradient(actual[i]), full_gradient(expected[i]))) << i;
        }
        plain.update();
        saving.update();
      }
    }
  });
}

INSTANTIATE_WORLDS(CheckpointedReductions, 2, 3);

}  // namespace
}  // namespace fsdp::testing
