// Freezing and unfreezing by either handle: what is reduced, and what an update moves.
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/full_value.h"
#include "tests/support/worlds.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

class FreezingEffects : public Worlds {};

struct Way {
  std::string name;
  std::function<void(torch::nn::LinearImpl&, bool requires_grad)> set;
};

// Both parameters of a layer.
const std::vector<Way>& ways() {
  static const std::vector<Way> ways{
      {"member.set_requires_grad",
       [](torch::nn::LinearImpl& layer, bool value) {
         layer.weight.set_requires_grad(value);
         layer.bias.set_requires_grad(value);
       }},
      {"member.requires_grad_",
       [](torch::nn::LinearImpl& layer, bool value) {
         layer.weight.requires_grad_(value);
         layer.bias.requires_grad_(value);
       }},
      {"entry.set_requires_grad",
       [](torch::nn::LinearImpl& layer, bool value) {
         for (auto& entry : layer.parameters()) entry.set_requires_grad(value);
       }},
      {"entry.requires_grad_", [](torch::nn::LinearImpl& layer, bool value) {
         for (auto& entry : layer.parameters()) entry.requires_grad_(value);
       }}};
  return ways;
}

torch::nn::Linear constant_unit(int64_t width, const DeviceMesh& mesh) {
  torch::nn::Linear layer(width, width);
  {
    torch::NoGradGuard no_grad;
    for (auto& parameter : layer->parameters()) parameter.fill_(0.5);
  }
  fully_shard(layer, mesh);
  return layer;
}

TEST_P(FreezingEffects, ByAnyHandleAndSpellingAndBackByAnyOther) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto reductions = [&](int64_t units) { return mesh.size() == 1 ? 0 : units; };
    for (const auto& freeze : ways()) {
      for (const auto& unfreeze : ways()) {
        SCOPED_TRACE(freeze.name + ", then " + unfreeze.name);
        MeasuredDecoder decoder(mesh);
        auto& head = *decoder.model->head;
        EXPECT_EQ(decoder.step().reduce_scatters, reductions(kUnits));

        freeze.set(head, false);
        const auto before = full_value(head.parameters()[0]).clone();
        EXPECT_EQ(decoder.step().reduce_scatters, reductions(kUnits - 1));
        for (const auto& entry : head.parameters()) {
          EXPECT_FALSE(entry.requires_grad());
          EXPECT_FALSE(entry.grad().defined());
        }
        EXPECT_FALSE(head.weight.requires_grad());
        EXPECT_TRUE(torch::equal(full_value(head.parameters()[0]), before));

        unfreeze.set(head, true);
        EXPECT_EQ(decoder.step().reduce_scatters, reductions(kUnits));
        EXPECT_TRUE(head.parameters()[0].requires_grad());
        EXPECT_TRUE(head.weight.requires_grad());
        EXPECT_FALSE(torch::equal(full_value(head.parameters()[0]), before));
      }
    }
  });
}

TEST_P(FreezingEffects, AFrozenParameterIsInNoReductionsBytes) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto peak_of_backward = [&](bool frozen) {
      auto layer = constant_unit(256, mesh);
      if (frozen) layer->weight.set_requires_grad(false);
      const auto loss = layer(torch::ones({1, 256})).sum();
      reset_peak(mesh);
      loss.backward();
      return counters(mesh).peak_bytes;
    };
    const int64_t packed = mesh.size() == 1 ? 0 : 256 * 256 * 4;  // one rank reduces nothing
    EXPECT_GE(peak_of_backward(false) - peak_of_backward(true), packed);
  });
}

TEST_P(FreezingEffects, TheSideThatChangedLastWins) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto layer = constant_unit(4, mesh);
    auto entry = layer->parameters()[0];
    const auto x = torch::ones({1, 4});
    layer->weight.set_requires_grad(false);
    layer(x).sum().backward();
    EXPECT_FALSE(entry.requires_grad());
    entry.set_requires_grad(true);
    layer(x).sum().backward();
    EXPECT_TRUE(layer->weight.requires_grad());
    EXPECT_TRUE(entry.grad().defined());
    entry.set_requires_grad(false);
    layer(x).sum().backward();
    EXPECT_FALSE(layer->weight.requires_grad());
    layer->weight.set_requires_grad(true);
    layer->zero_grad();
    layer(x).sum().backward();
    EXPECT_TRUE(entry.requires_grad());
    EXPECT_TRUE(entry.grad().defined());
  });
}

INSTANTIATE_WORLDS(FreezingEffects, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
