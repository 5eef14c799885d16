// What is gathered ahead: successors that were learned, explicit lists, the switches.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace fsdp::testing {
namespace {

class PrefetchEffects : public Worlds {};

TEST_P(PrefetchEffects, TheFirstForwardFollowsRegistrationAndTheFirstBackwardGuessesNothing) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    // Not the first one, and not the root, which is registered last but used before the
    // head.
    EXPECT_EQ(decoder.forward().prefetched, kUnits - 2);
    EXPECT_EQ(decoder.backward().prefetched, 0);
  });
}

TEST_P(PrefetchEffects, AStepThatRepeatsHasEveryGatherButTheFirstIssuedAhead) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    for (int step = 1; step < 4; ++step) {
      const auto forward = decoder.forward(), backward = decoder.backward();
      EXPECT_EQ(forward.prefetched, kUnits - 1) << step;
      EXPECT_EQ(backward.prefetched, kBlocks) << step;
      EXPECT_EQ(forward.unused + backward.unused, 0) << step;
      EXPECT_EQ(counters(mesh).staging_bytes, 0) << step;
      decoder.update();
    }
  });
}

TEST_P(PrefetchEffects, UnshardInBackwardFalseLeavesTheGatherToTheTouch) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    decoder.block(1).set_unshard_in_backward(false);
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(decoder.forward().prefetched, kUnits - 1) << step;
      const auto backward = decoder.backward();
      EXPECT_EQ(backward.all_gathers, kBlocks) << step;
      EXPECT_EQ(backward.prefetched, kBlocks - 1) << step;
      decoder.update();
    }
    for (int64_t i = 0; i < kBlocks; ++i) decoder.block(i).set_unshard_in_backward(false);
    decoder.forward();
    EXPECT_EQ(decoder.backward().prefetched, 0);
    decoder.block(1).set_unshard_in_backward(true);
    decoder.forward();
    EXPECT_EQ(decoder.backward().prefetched, 1);
  });
}

TEST_P(PrefetchEffects, AForwardListReplacesTheSuccessor) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.block(0).set_modules_to_forward_prefetch({decoder.block(2), decoder.block(3)});
    auto& model = *decoder.model;
    torch::NoGradGuard no_grad;
    torch::Tensor x;
    const auto data = make_data(5);
    // Issued by the embedding's touch: itself and block 0.
    EXPECT_EQ(traffic_of(mesh, [&] { x = model.embedding(data.index); }).all_gathers, 2);
    auto traffic = traffic_of(mesh, [&] { x = model.blocks[0](x); });
    EXPECT_EQ(traffic.all_gathers, 2);
    EXPECT_EQ(traffic.prefetched, 2);
    traffic = traffic_of(mesh, [&] { x = model.blocks[1](x); });
    EXPECT_EQ(traffic.all_gathers, 1);
    EXPECT_EQ(traffic.prefetched, 0);
    EXPECT_EQ(traffic_of(mesh, [&] { x = model.blocks[2](x); }).all_gathers, 0);
    EXPECT_EQ(traffic_of(mesh, [&] { x = model.blocks[3](x); }).all_gathers, 1);  // the head's
  });
}

TEST_P(PrefetchEffects, ABackwardListReplacesTheSuccessor) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.head().set_modules_to_backward_prefetch({decoder.block(3), decoder.block(2)});
    decoder.forward();
    const auto backward = decoder.backward();  // the first: nothing is known
    EXPECT_EQ(backward.all_gathers, kBlocks);
    EXPECT_EQ(backward.prefetched, 2);
  });
}

TEST_P(PrefetchEffects, AListedUnitThatIsNotUsedIsDroppedWhenTheKindOfPassChanges) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    decoder.step();
    decoder.head().set_modules_to_forward_prefetch({decoder.block(0)});
    EXPECT_EQ(decoder.forward().all_gathers, kUnits + 1);
    EXPECT_EQ(decoder.backward().unused, 1);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    EXPECT_EQ(decoder.resident_bytes(), 0);
  });
}

TEST_P(PrefetchEffects, ABranchNotTakenCostsOneUnusedGather) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    auto& model = *decoder.model;
    const auto data = make_data(5);
    const auto run = [&](bool skip) {
      auto x = model.embedding(data.index);
      for (size_t i = 0; i < model.blocks.size(); ++i) {
        if (i != 1 || !skip) x = model.blocks[i](x);
      }
      return model.head(model.norm(x)).sum();
    };
    run(false).backward();
    run(false).backward();
    torch::Tensor loss;
    const auto forward = traffic_of(mesh, [&] { loss = run(true); });
    EXPECT_EQ(forward.all_gathers, kUnits);  // block 1 in vain
    EXPECT_EQ(forward.unused, 1);
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    loss.backward();
  });
}

// Layers that are called in an order of the test's choice.
struct LettersImpl : torch::nn::Module {
  LettersImpl() {
    for (const char* name : {"a", "b", "c", "d"})
      layers.push_back(register_module(name, make_linear(4, 4)));
  }
  torch::Tensor forward(torch::Tensor x, const std::vector<size_t>& order) {
    for (const auto layer : order) x = torch::tanh(layers[layer](x));
    return x.sum();
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Letters);

Letters sharded_letters(const DeviceMesh& mesh) {
  Letters model;
  for (auto& layer : model->layers) fully_shard(layer, mesh);
  fully_shard(model, mesh);
  return model;
}

constexpr size_t kA = 0, kB = 1, kC = 2, kD = 3;

TEST_P(PrefetchEffects, NothingIsGuessedInTheFirstBackwardWhateverTheOrderOfRegistration) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded_letters(mesh);
    // Backward goes b, c, d, a: as registered, but for the last one.
    const auto loss = model->forward(torch::ones({1, 4}), {kA, kD, kC, kB});
    const auto backward = traffic_of(mesh, [&] { loss.backward(); });
    EXPECT_EQ(backward.all_gathers, 2);  // c and d; the first layer's input needs no gradient
    EXPECT_EQ(backward.prefetched, 0);
  });
}

TEST_P(PrefetchEffects, NothingIsGatheredAfterTheLastUnitOnceItIsKnown) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded_letters(mesh);
    for (int step = 0; step < 3; ++step) {
      const auto traffic = traffic_of(mesh, [&] {
        model->forward(torch::ones({1, 4}), {kC, kB, kD, kA}).backward();
      });
      // At first b is taken to follow a.
      if (step > 0) {
        EXPECT_EQ(traffic.unused, 0) << step;
      }
      EXPECT_EQ(traffic.all_gathers - traffic.unused, 6) << step;
    }
  });
}

TEST_P(PrefetchEffects, TheEndOfARepeatedPassDoesNotFetchItsBeginning) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    MeasuredDecoder decoder(mesh);
    for (int round = 0; round < 4; ++round) {
      const auto inference = decoder.inference();
      EXPECT_EQ(inference.unused, 0) << round;
      EXPECT_EQ(counters(mesh).staging_bytes, 0) << round;
    }
    EXPECT_EQ(decoder.step().unused, 0);
  });
}

TEST_P(PrefetchEffects, ABackwardThatEndsEarlyDropsWhatWasGatheredForIt) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = sharded_letters(mesh);
    const auto x = torch::ones({1, 4});
    for (int step = 0; step < 2; ++step) model->forward(x, {kA, kB, kC, kD}).backward();
    torch::Tensor loss;
    {
      torch::NoGradGuard no_grad;
      loss = model->layers[kB](torch::tanh(model->layers[kA](x)));
    }
    loss = model->forward(loss, {kC, kD});
    const auto backward = traffic_of(mesh, [&] { loss.backward(); });
    EXPECT_EQ(backward.unused, 1);  // c was to follow d, but its input needs no gradient here
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

// Three layers; the first may be left out, and so may the second one's bias.
struct OptionalLayersImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x, bool with_first, bool with_bias) {
    if (with_first) x = layer[0](x);
    x = torch::linear(x, layer[1]->weight, with_bias ? layer[1]->bias : torch::Tensor());
    return layer[2](x);
  }
  std::vector<torch::nn::Linear> layer = {register_module("first", make_linear(4, 4)),
                                          register_module("second", make_linear(4, 4)),
                                          register_module("third", make_linear(4, 4))};
};
TORCH_MODULE(OptionalLayers);

// Where the second layer's bias has no gradient its reduction leaves at the end only, and
// with it what was put off: the first layer, as in the steps before.
TEST_P(PrefetchEffects, WhatIsPutOffIsGatheredOnAllRanksThoughGradientsLeaveOnSome) {
  on_ranks([this](int64_t rank, const DeviceMesh& mesh) {
    OptionalLayers model;
    for (auto& layer : model->layer) fully_shard(layer, mesh);
    auto root = fully_shard(model, mesh);
    root.set_backward_prefetch(BackwardPrefetch::kPost);
    root.set_reduce_scatter_unused_params(true);
    const auto step = [&](bool with_first, bool with_bias) {
      return traffic_of(mesh, [&] {
        const auto input = torch::ones({2, 4}).requires_grad_();  // so backward enters the second
        model(input, with_first, with_bias).sum().backward();
      });
    };
    for (int i = 0; i < 2; ++i) step(true, true);
    const auto without = step(false, rank != world() - 1);
    EXPECT_EQ(without.unused, 1) << "the first layer was expected, on every rank";
    EXPECT_EQ(step(true, true).unused, 0);
  });
}

INSTANTIATE_WORLDS(PrefetchEffects, 2, 3);

}  // namespace
}  // namespace fsdp::testing
