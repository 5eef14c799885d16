// Rank 0 of worlds of 2 to 64 in which nothing is sent: on the device and on the CPU the
// same values but for rounding. One GPU has all of a large world's copies, streams and
// memory this way.
#include "fully_shard/fully_shard.h"
#include "tests/on_gpu/gpu.h"
#include "tests/training_programs/failing_backwards.h"
#include "tests/training_programs/stream_programs.h"
#include "tests/training_programs/training_settings.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

// A fake world's all-to-all gives a rank what it sends to others as theirs, which is
// shorter: the rest of it are no codes.
bool adds_codes_of_others(const Setting& setting) {
  const auto& codecs = setting.options.gradient_codecs;
  return codecs.shards || codecs.replicas;
}

std::vector<Setting> settings_of_fake_worlds() {
  auto settings = training_settings();
  std::erase_if(settings, adds_codes_of_others);
  settings.push_back({.name = "Plain"});
  settings.push_back({.name = "Kept", .options = {.reshard_after_forward = false}});
  settings.push_back(
      {.name = "Offloaded", .options = {.offload_policy = {.offload_to_cpu = true}}});
  settings.push_back(
      {.name = "OffloadedToPageableMemory",
       .options = {.offload_policy = {.offload_to_cpu = true, .pin_memory = false}}});
  settings.push_back({.name = "TwoRanks", .mesh = {2}});
  settings.push_back({.name = "EightRanks", .mesh = {8}});
  settings.push_back({.name = "SixtyFourRanks", .mesh = {64}});
  settings.push_back({.name = "HybridOfSixtyFourRanks", .mesh = {8, 8}});
  return settings;
}

class FakeWorlds : public ::testing::TestWithParam<Setting> {};

TEST_P(FakeWorlds, HaveTheValuesOfTheCpu) {
  SKIP_WITHOUT_TESTED_DEVICE();
  const auto& setting = GetParam();
  const auto program = training_with(setting);
  const auto ranks = ranks_of(setting.mesh);
  const auto expected = run_in_fake_world(program, c10::kCPU, ranks);
  const auto values = run_in_fake_world(program, tested_device_type(), ranks);
  const bool is_mixed = setting.options.mp_policy.param_dtype.has_value();
  EXPECT_LE(largest_difference(values, expected), is_mixed ? kRoundingOf16Bits : kRounding);
}

INSTANTIATE_TEST_SUITE_P(All, FakeWorlds, ::testing::ValuesIn(settings_of_fake_worlds()),
                         [](const auto& info) { return info.param.name; });

class FakeWorldsOnTwoStreams : public ::testing::TestWithParam<NamedProgram> {};

TEST_P(FakeWorldsOnTwoStreams, HaveTheValuesOfTheCpu) {
  SKIP_WITHOUT_TESTED_DEVICE();
  const auto& program = GetParam().program;
  for (const int64_t ranks : {2, 8}) {
    const auto expected = run_in_fake_world(program, c10::kCPU, ranks);
    const auto values = run_in_fake_world(program, tested_device_type(), ranks);
    EXPECT_LE(largest_difference(values, expected), kRounding) << ranks << " ranks";
  }
}

INSTANTIATE_TEST_SUITE_P(All, FakeWorldsOnTwoStreams, ::testing::ValuesIn(stream_programs()),
                         [](const auto& info) { return info.param.name; });

class FailedBackwardsInFakeWorlds : public ::testing::TestWithParam<Next> {};

TEST_P(FailedBackwardsInFakeWorlds, AreCleanedUpBeforeTheNextStep) {
  SKIP_WITHOUT_TESTED_DEVICE();
  for (int64_t throwing = 0; throwing < kFailingLayers; ++throwing) {
    const auto program = failing_backwards(throwing, GetParam());
    const auto expected = run_in_fake_world(program, c10::kCPU, 2);
    const auto values = run_in_fake_world(program, tested_device_type(), 2);
    EXPECT_LE(largest_difference(values, expected), kRounding) << "layer " << throwing;
  }
}

INSTANTIATE_TEST_SUITE_P(All, FailedBackwardsInFakeWorlds,
                         ::testing::Values(Next::kForward, Next::kExplicitUnshard,
                                           Next::kWriteEntries, Next::kExplicitReshard));

}  // namespace
}  // namespace fsdp::testing
