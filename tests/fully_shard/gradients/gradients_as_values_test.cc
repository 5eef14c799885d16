// Gradients as values, optimizers built too early, announced and unannounced writes.
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/worlds.h"
#include "tests/support/write_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Autograd : public Worlds {};

TEST_P(Autograd, GradGivesThisRanksFullGradients) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(5, 2); });
    auto sharded = build_seeded([] { return decoder_model(5, 2); });
    shard_decoder(*sharded.module, mesh);
    const auto mine = make_data(static_cast<uint64_t>(rank));
    const auto expected = torch::autograd::grad({plain.loss(mine)}, plain.module->parameters());
    const auto actual = grad({sharded.loss(mine)}, sharded.module->parameters());
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::equal(actual[i], expected[i])) << i;
    for (const auto& parameter : sharded.module->parameters())
      EXPECT_FALSE(parameter.grad().defined());
  });
}

TEST_P(Autograd, AGradientPenaltyOnParametersHasTheUnshardedNumbers) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(5, 2); });
    auto sharded = build_seeded([] { return decoder_model(5, 2); });
    shard_decoder(*sharded.module, mesh);
    const auto penalised = [](const Model& model, const auto& gradient) {
      return [&model, gradient](const Data& data) {
        const auto loss = model.loss(data);
        auto penalty = torch::zeros({});
        for (const auto& g : gradient(loss, model.module->parameters()))
          penalty = penalty + g.pow(2).sum();
        return loss + 0.1 * penalty;
      };
    };
    const Model plain_penalised{plain.module,
                                penalised(plain, [](const auto& loss, const auto& parameters) {
                                  return torch::autograd::grad({loss}, parameters, {}, true, true);
                                })};
    const auto sharded_penalised = penalised(sharded, [](const auto& loss, const auto& parameters) {
      return grad({loss}, parameters, {}, true, true);
    });
    const auto expected = expected_gradients(plain_penalised, world(), 4);
    sharded_penalised(make_data(407 + static_cast<uint64_t>(rank))).backward();
    expect_gradients(*sharded.module, expected, world(), "penalty");
  });
}

TEST_P(Autograd, TorchsOwnGradOfRegistryEntriesIsAnError) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*sharded.module, mesh);
    const auto loss = sharded.loss(make_data(1));
    expect_error([&] { torch::autograd::grad({loss}, sharded.module->parameters()); },
                 HasSubstr("appears to not have been used in the graph"));
    expect_error([&] { grad({loss}, {sharded.module->parameters()[0].detach()}); },
                 HasSubstr("detached alias"));
    EXPECT_NO_THROW(sharded.loss(make_data(1)).backward());
  });
}

TEST_P(Autograd, AnOptimizerBuiltBeforeFullyShardIsToldAtItsFirstStep) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(5, 1); });
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    torch::optim::SGD sgd(sharded.module->parameters(),
                          torch::optim::SGDOptions(0.1).weight_decay(0.1));
    torch::optim::AdamW adamw(sharded.module->parameters(),
                              torch::optim::AdamWOptions(0.1).weight_decay(0));
    shard_decoder(*sharded.module, mesh);
    for (torch::optim::Optimizer* optimizer :
         std::initializer_list<torch::optim::Optimizer*>{&sgd, &adamw}) {
      sharded.loss(make_data(1)).backward();
      expect_error([&] { optimizer->step(); },
                   AllOf(HasSubstr("'embedding.weight'"), HasSubstr("built before fully_shard")));
      expect_error([&] { optimizer->zero_grad(); }, HasSubstr("built before fully_shard"));
      sharded.module->zero_grad();
    }
    const auto expected = expected_gradients(plain, world(), 4);
    sharded.loss(make_data(407 + static_cast<uint64_t>(rank))).backward();
    expect_gradients(*sharded.module, expected, world(), "afterwards");
  });
}

TEST_P(Autograd, WhatAnEarlyOptimizerWroteBeforeItFoundOutIsDropped) {
  if (world() == 1) return;  // there the member is the shard
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(5, 1); });
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    torch::optim::AdamW optimizer(sharded.module->parameters(),
                                  torch::optim::AdamWOptions(0.1).weight_decay(0.5));
    shard_decoder(*sharded.module, mesh);
    sharded.loss(make_data(1)).backward();
    expect_error([&] { optimizer.step(); }, HasSubstr("built before fully_shard"));
    EXPECT_TRUE(torch::equal(sharded.loss(make_data(2)), plain.loss(make_data(2))));
  });
}

TEST_P(Autograd, WritesThroughALocalAliasMustBeAnnounced) {
  if (world() == 1) return;  // the member is the shard: nothing can be stale
  const WriteChecks checks;
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    torch::nn::Linear linear(3, 5);
    torch::nn::init::constant_(linear->weight, 0.5);  // the same on every rank
    torch::nn::init::constant_(linear->bias, 0.5);
    fully_shard(linear, mesh);
    const auto x = torch::ones({1, 3});
    const auto entry = linear->parameters()[0];
    torch::NoGradGuard no_grad;
    linear(x);
    DTensor(entry).to_local().fill_(1);
    mark_shard_written(entry);
    EXPECT_TRUE(torch::equal(linear->weight.sum(), torch::tensor(15.0f)));
    DTensor(entry).to_local().fill_(2);
    expect_error([&] { linear(x); },
                 AllOf(HasSubstr("'weight'"), HasSubstr("fsdp::mark_shard_written(parameter)")));
  });
}

INSTANTIATE_WORLDS(Autograd, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
