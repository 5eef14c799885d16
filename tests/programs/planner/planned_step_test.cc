// Steps of jobs that are not there, beside what must hold for them.
#include "programs/planner/planned_step.h"

#include "fake_device/fake_device.h"
#include "programs/planner/model_sizes.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

namespace programs {
namespace {

using fsdp::testing::expect_error;
using ::testing::HasSubstr;

TrainingOptions small_options() {
  TrainingOptions options;
  options.model = checked({.vocab = 512, .width = 64, .blocks = 4, .max_tokens = 64});
  options.batch = 2;
  options.tokens = 64;
  return options;
}

int64_t bytes_of(const MeasuredStep& step, const std::string& dim, const std::string& collective) {
  int64_t bytes = 0;
  for (const auto& one : step.traffic)
    bytes += one.dim == dim && one.collective == collective ? one.bytes : 0;
  return bytes;
}

TEST(ModelSizes, AreThoseThatModelsAreCalledBy) {
  TrainingOptions options;
  options.batch = 1;
  options.tokens = 8;
  const std::pair<const char*, double> models[] = {
      {"llama-8b", 8.03e9}, {"llama-70b", 70.55e9}, {"llama-405b", 405.85e9}};
  for (const auto& [name, parameters] : models) {
    options.model = model_called(name);
    const auto step = plan_step(options, {.ranks = 64});
    EXPECT_NEAR(step.unsharded_bytes / 4, parameters, 0.001 * parameters) << name;
  }
  expect_error<c10::ValueError>([] { model_called("gpt-5"); }, HasSubstr("--config: gpt-5"));
}

TEST(PlannedStep, KeepsShardsGradientsAndTwoMomentsOfThem) {
  for (const int64_t ranks : {1, 2, 8}) {  // no shard is padded
    const auto step = plan_step(small_options(), {.ranks = ranks});
    const auto& memory = step.memory;
    EXPECT_GE(memory.parameters, static_cast<int64_t>(step.unsharded_bytes) / ranks);
    EXPECT_NEAR(static_cast<double>(memory.gradients), static_cast<double>(memory.parameters),
                0.02 * static_cast<double>(memory.parameters));
    EXPECT_NEAR(static_cast<double>(memory.optimizer), 2.0 * static_cast<double>(memory.parameters),
                0.04 * static_cast<double>(memory.parameters));
    EXPECT_GE(memory.peak, memory.parameters + memory.optimizer + memory.activations);
  }
}

TEST(PlannedStep, ARankThatIsLastHasTheSmallestOptimizerState) {
  auto options = small_options();
  const auto first = plan_step(options, {.ranks = 48, .rank = 0});
  const auto last = plan_step(options, {.ranks = 48, .rank = 47});
  EXPECT_LT(last.memory.optimizer, first.memory.optimizer);
}

TEST(PlannedStep, SendsLessToHalfTheRanksWithHybridSharding) {
  auto options = small_options();
  const auto all = plan_step(options, {.ranks = 64});
  options.replicas = 8;
  const auto hybrid = plan_step(options, {.ranks = 64});
  EXPECT_LT(bytes_of(hybrid, "dp", "all-gather"), bytes_of(all, "dp", "all-gather"));
  EXPECT_GT(bytes_of(hybrid, "replicate", "all-reduce"), 0);
  EXPECT_EQ(bytes_of(all, "replicate", "all-reduce"), 0);
  EXPECT_GT(hybrid.memory.parameters, all.memory.parameters);
}

TEST(PlannedStep, GathersFromNeighboursInBackwardWhereTheyKeepParameters) {
  auto options = small_options();
  options.sharding.reshard_after_forward = fsdp::ReshardAfterForward::to_world(2);
  std::map<int64_t, int64_t> once;
  for (const int64_t times : {1, 3}) {
    options.accumulate = times;
    std::map<int64_t, int64_t> bytes;
    for (const auto& one : plan_step(options, {.ranks = 8}).traffic)
      if (one.collective == "all-gather") bytes[one.group] += one.bytes;
    ASSERT_EQ(bytes.size(), 2u);
    EXPECT_GT(bytes[8], bytes[2]);
    EXPECT_GT(bytes[2], 0);
    if (times == 1) once = bytes;
    for (const auto& [group, of_one] : once) EXPECT_EQ(bytes[group], times * of_one) << group;
  }
}

TEST(PlannedStep, TensorParallelismCutsWhatIsComputed) {
  auto options = small_options();
  const auto whole = plan_step(options, {.ranks = 8});
  options.tp = 2;
  const auto cut = plan_step(options, {.ranks = 8});
  EXPECT_GT(bytes_of(cut, "tp", "all-reduce"), 0);
  EXPECT_LT(cut.flops, 0.6 * whole.flops);
  EXPECT_GT(cut.flops, 0.4 * whole.flops);
}

TEST(PlannedStep, RecomputingCostsAThirdMoreAndKeepsLess) {
  auto options = small_options();
  const auto kept = plan_step(options, {.ranks = 8});
  options.checkpoint_activations = true;
  const auto recomputed = plan_step(options, {.ranks = 8});
  EXPECT_LT(recomputed.memory.activations, kept.memory.activations / 2);
  EXPECT_GT(recomputed.flops, 1.1 * kept.flops);
  EXPECT_LT(recomputed.flops, 4.0 / 3 * kept.flops);
}

// Six for each parameter and token, and attention's.
TEST(PlannedStep, CountsTheProductsOfAStep) {
  auto options = small_options();
  const auto step = plan_step(options, {.ranks = 1});
  const double tokens = 2 * 64, embedding = 512 * 64, norms = 9 * 64;
  const double in_products = step.unsharded_bytes / 4 - embedding - norms;
  const double scores = 2.0 * 64 * 64 * 64 / 2;  // batch, queries, keys, width; half are causal
  EXPECT_DOUBLE_EQ(step.flops, 6 * tokens * in_products + 4 * 2 * (2 + 5) * scores);
}

TEST(PlannedStep, RefusesMeshesAsTrainingDoes) {
  auto options = small_options();
  options.tp = 3;
  expect_error<c10::ValueError>([&] { plan_step(options, {.ranks = 8}); }, HasSubstr("--tp: 3"));
  EXPECT_NO_THROW(plan_step(small_options(), {.ranks = 8}));
}

TEST(PlannedStep, LeavesNothingBehind) {
  plan_step(small_options(), {.ranks = 8});
  const auto before = fsdp::fake_memory().now;
  plan_step(small_options(), {.ranks = 8});
  EXPECT_EQ(fsdp::fake_memory().now, before);
}

}  // namespace
}  // namespace programs
