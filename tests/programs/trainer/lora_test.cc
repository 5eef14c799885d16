#include "programs/trainer/model/lora.h"

#include "dtensor/dtensor.h"
#include "fully_shard/counters.h"
#include "fully_shard/fully_shard.h"
#include "programs/trainer/model/transformer.h"
#include "programs/trainer/setup/sharded_model.h"
#include "tests/support/default_generator.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

namespace programs {
namespace {

using ::testing::HasSubstr;

constexpr TransformerConfig kConfig{
    .vocab = 64, .width = 32, .blocks = 2, .heads = 4, .kv_heads = 2, .max_tokens = 8};

bool is_adapter(const std::string& name) { return name.find(".lora_") != std::string::npos; }

torch::Tensor some_tokens() { return torch::arange(16, torch::kLong).view({2, 8}); }

TEST(Lora, FreezesTheModelAndChangesNothingAtFirst) {
  torch::manual_seed(1);
  Transformer plain(kConfig);
  const torch::NoGradGuard no_grad;
  const auto before = plain->forward(some_tokens());
  add_adapters(*plain, {.rank = 4, .targets = {"query", "up"}, .frozen_dtype = torch::kFloat});
  EXPECT_TRUE(torch::equal(plain->forward(some_tokens()), before));
  int64_t adapters = 0;
  for (const auto& item : plain->named_parameters()) {
    EXPECT_EQ(item.value().requires_grad(), is_adapter(item.key())) << item.key();
    adapters += is_adapter(item.key());
  }
  EXPECT_EQ(adapters, 2 * 2 * 2);
}

TEST(Lora, UnknownTargetsAreRefused) {
  Transformer model(kConfig);
  EXPECT_THAT(fsdp::testing::message_of([&] {
                add_adapters(*model, {.rank = 4, .targets = {"query", "quarry"}});
              }),
              HasSubstr("no layer that may have one is called 'quarry'"));
}

// Of a step, on this rank.
struct Traffic {
  int64_t gathered = 0, reduced = 0;
};

Traffic train_step(Transformer& model, torch::optim::Optimizer& optimizer,
                   const fsdp::DeviceMesh& mesh) {
  const auto before = fsdp::counters(mesh);
  next_token_loss(model->forward(some_tokens()), some_tokens()).backward();
  optimizer.step();
  optimizer.zero_grad();
  const auto after = fsdp::counters(mesh);
  return {after.all_gather_bytes - before.all_gather_bytes,
          after.reduce_scatter_bytes - before.reduce_scatter_bytes};
}

// Parts of a unit begin at multiples of 64 bytes, and all of these sizes are multiples of
// that on two ranks.
TEST(Lora, OnlyAdaptersHaveGradientTrafficAndOptimizerState) {
  fsdp::testing::run_ranks(2, [](int64_t) {
    const auto mesh = fsdp::init_device_mesh(torch::kCPU, {2}, {"dp"});
    auto model = fsdp::testing::drawn_from_seed(1, [] {
      Transformer drawn(kConfig);
      add_adapters(*drawn, {.rank = 4, .targets = {"query", "value", "down"}});
      return drawn;
    });
    for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
    fsdp::fully_shard(model, mesh);
    std::vector<torch::Tensor> trained;
    int64_t adapter_bytes = 0, frozen_bytes = 0;
    for (const auto& item : model->named_parameters()) {
      const auto bytes = static_cast<int64_t>(item.value().numel() * item.value().element_size());
      if (is_adapter(item.key())) {
        EXPECT_EQ(item.value().scalar_type(), torch::kFloat);
        adapter_bytes += bytes;
        trained.push_back(item.value());
      } else {
        EXPECT_EQ(item.value().scalar_type(), torch::kBFloat16);
        frozen_bytes += bytes;
      }
    }
    torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(1e-2));
    train_step(model, optimizer, mesh);
    const auto traffic = train_step(model, optimizer, mesh);
    // Rows of gradients begin with the flags of their unit; the root has none.
    EXPECT_EQ(traffic.reduced, adapter_bytes / 2 + 2 * 64);
    // The root is not gathered for backward again; the rest is, unless it lies in place.
    EXPECT_GE(traffic.gathered, (adapter_bytes + frozen_bytes) / 2);
    EXPECT_LE(traffic.gathered, adapter_bytes + frozen_bytes);
    EXPECT_EQ(optimizer.state().size(), trained.size());
    for (const auto& item : model->named_parameters())
      EXPECT_EQ(item.value().grad().defined(), false) << item.key();
  });
}

LoraOptions adapters_everywhere() {
  return {.rank = 4,
          .targets = {"query", "key", "value", "output", "gate", "up", "down"},
          .frozen_dtype = torch::kFloat};
}

// Weights that are large enough for every adapter to count.
Transformer model_with_adapters() {
  return fsdp::testing::drawn_from_seed(1, [] {
    Transformer drawn(kConfig);
    add_adapters(*drawn, adapters_everywhere());
    const torch::NoGradGuard no_grad;
    for (auto& parameter : drawn->parameters())
      if (parameter.dim() == 2) parameter.normal_(0, 0.15);
    return drawn;
  });
}

// The losses of some steps, and the adapters after them.
std::vector<torch::Tensor> trained_adapters(Transformer& model) {
  std::vector<torch::Tensor> adapters, results;
  for (const auto& item : model->named_parameters())
    if (is_adapter(item.key())) adapters.push_back(item.value());
  torch::optim::SGD optimizer(adapters, torch::optim::SGDOptions(0.01));
  for (int step = 0; step < 2; ++step) {
    const auto loss = next_token_loss(model->forward(some_tokens()), some_tokens());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    results.push_back(fsdp::full_tensor(loss).detach());
  }
  for (const auto& adapter : adapters) results.push_back(fsdp::full_tensor(adapter).detach());
  return results;
}

TEST(Lora, AdaptersAreCutByTensorParallelismAsTheirLayersAre) {
  auto whole = model_with_adapters();
  const auto expected = trained_adapters(whole);
  ASSERT_GT((expected[0] - expected[1]).abs().item<double>(), 1e-3);
  for (const bool sequence_parallel : {false, true}) {
    fsdp::testing::run_ranks(4, [&](int64_t) {
      const TrainingOptions options{.model = kConfig,
                                    .lora = adapters_everywhere(),
                                    .tp = 2,
                                    .sequence_parallel = sequence_parallel};
      const auto mesh = mesh_of(options, 4);
      auto model = shard_model(model_with_adapters(), options, mesh).model;
      const auto results = trained_adapters(model);
      ASSERT_EQ(results.size(), expected.size());
      for (size_t i = 0; i < results.size(); ++i)
        EXPECT_LT((results[i] - expected[i]).abs().max().item<double>(), 1e-5)
            << i << " of " << expected[i].abs().max().item<double>();
    });
  }
}

}  // namespace
}  // namespace programs
