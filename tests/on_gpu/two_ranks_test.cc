// Two ranks that are processes, over NCCL: on one GPU each, or both on one, which NCCL
// allows to processes that say that they are on two hosts. The values are those of two
// ranks on the CPU, but for rounding, also where one of a program's two streams lags.
#include "device_mesh/process_group.h"
#include "tests/on_gpu/gpu.h"
#include "tests/support/process_ranks.h"
#include "tests/support/with_environment.h"
#include "tests/training_programs/batch_norm.h"
#include "tests/training_programs/failing_backwards.h"
#include "tests/training_programs/ranks_that_differ.h"
#include "tests/training_programs/stream_programs.h"
#include "tests/training_programs/training_settings.h"
#include "tests/training_programs/transformers.h"

#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr int64_t kRanks = 2;

// A world of the tested device; the current device is this rank's while it lives.
class WorldOfProcesses {
 public:
  WorldOfProcesses() {
    const auto rank = launch_environment().rank;
    if (tested_device_type() != c10::kCPU) {
      const bool share = cuda_devices() < kRanks;
      if (share) {
        setenv("NCCL_HOSTID", ("rank" + std::to_string(rank)).c_str(), 1);
        setenv("NCCL_SOCKET_IFNAME", "lo", 1);
        setenv("LOCAL_RANK", "0", 1);
      }
      guard_.emplace(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(share ? 0 : rank)));
    }
    init_process_group({.backend = tested_backend(), .timeout = std::chrono::seconds(60)});
  }
  ~WorldOfProcesses() { destroy_process_group(); }
  WorldOfProcesses(const WorldOfProcesses&) = delete;
  WorldOfProcesses& operator=(const WorldOfProcesses&) = delete;

 private:
  std::optional<c10::DeviceGuard> guard_;
};

struct Case {
  std::string name;
  TrainingProgram program;
  double tolerance = kRounding;
  TrainingProgram on_cpu = {};  // empty: the same
};

// Says which values are wrong; true for none.
bool has_the_values_of_cpu(const Case& tested, const ProgramHooks& hooks,
                           const std::vector<Values>& expected) {
  ProgramRank rank(init_device_mesh(tested_device_type(), {kRanks}), hooks);
  tested.program(rank);
  const auto difference =
      largest_difference(rank.values(), expected[static_cast<size_t>(rank.rank())]);
  std::cout << tested.name << " on rank " << rank.rank() << ": differs by " << difference << "\n";
  return difference <= tested.tolerance;
}

// The exit code of a rank: how many runs had other values.
int run_cases(const std::vector<Case>& cases, const std::vector<ProgramHooks>& variants) {
  // Before the world, which ranks that are threads would join.
  std::vector<std::vector<Values>> expected;
  for (const auto& each : cases)
    expected.push_back(run_on_cpu(each.on_cpu ? each.on_cpu : each.program, kRanks));
  const WorldOfProcesses world;
  int wrong = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    for (const auto& hooks : variants)
      if (!has_the_values_of_cpu(cases[i], hooks, expected[i])) ++wrong;
  }
  return wrong;
}

void expect_every_rank_ends_well(const std::string& child) {
  for (const auto& end : run_processes(child, kRanks, std::chrono::seconds(180)))
    EXPECT_EQ(end.exit_code, 0) << end.output;
}

const ChildCase kStreamPrograms("stream_programs_of_two_ranks", [] {
  std::vector<Case> cases;
  for (const auto& [name, program, gradients] : stream_programs()) cases.push_back({name, program});
  return run_cases(
      cases, {{}, {.before_side = occupy_current_stream}, {.after_side = occupy_current_stream}});
});

TEST(TwoRanks, TrainOnTwoStreamsAsOnTheCpu) {
  SKIP_WITHOUT_TESTED_DEVICE();
  expect_every_rank_ends_well("stream_programs_of_two_ranks");
}

const ChildCase kSettings("settings_of_two_ranks", [] {
  std::vector<Case> cases;
  for (auto setting : training_settings()) {
    setting.mesh = setting.mesh.size() == 1 ? std::vector<int64_t>{2} : std::vector<int64_t>{2, 1};
    const bool is_mixed = setting.options.mp_policy.param_dtype.has_value();
    cases.push_back(
        {setting.name, training_with(setting), is_mixed ? kRoundingOf16Bits : kRounding});
  }
  const Setting offloaded{
      .name = "Offloaded", .mesh = {2}, .options = {.offload_policy = {.offload_to_cpu = true}}};
  cases.push_back({offloaded.name, training_with(offloaded)});
  return run_cases(cases, {{}});
});

TEST(TwoRanks, TrainWithEverySettingAsOnTheCpu) {
  SKIP_WITHOUT_TESTED_DEVICE();
  expect_every_rank_ends_well("settings_of_two_ranks");
}

const ChildCase kTransformers("transformers_of_two_ranks", [] {
  const auto place = launch_environment();
  const auto shared = ::testing::TempDir() + "two_ranks_" + std::to_string(place.master_port);
  const auto own = shared + "_threads_of_" + std::to_string(place.rank);
  return run_cases({{"transformer", train_transformer},
                    {"in half", train_transformer_in_half, kRoundingOf16Bits},
                    {"tensor-parallel", train_tensor_parallel_transformer},
                    {"batch norm of DTensors", normalize_a_cut_batch},
                    {.name = "resumed",
                     .program = training_that_is_resumed(shared),
                     .on_cpu = training_that_is_resumed(own)}},
                   {{}});
});

TEST(TwoRanks, TrainTransformersAsOnTheCpu) {
  SKIP_WITHOUT_TESTED_DEVICE();
  expect_every_rank_ends_well("transformers_of_two_ranks");
}

const ChildCase kFailures("failed_backwards_of_two_ranks", [] {
  return run_cases({{"forward", failing_backwards(1, Next::kForward)},
                    {"unshard", failing_backwards(2, Next::kExplicitUnshard)},
                    {"write", failing_backwards(0, Next::kWriteEntries)},
                    {"reshard", failing_backwards(3, Next::kExplicitReshard)}},
                   {{}});
});

const ChildCase kDifferences("differences_of_two_ranks", [] {
  const WithEnvironment over_gloo("FSDP_PEER_MEMORY", "off");  // the CPU gathers, as devices do
  std::vector<Case> cases;
  for (const auto& programs : {gradients_that_differ(), mistakes_of_ranks()}) {
    for (const auto& [name, ranks, program] : programs) {
      if (ranks == kRanks) cases.push_back({name, program});
    }
  }
  return run_cases(cases, {{}});
});

// Also in what they are told, though NCCL itself compares nothing.
TEST(TwoRanks, ThatDifferAreToldAsOnTheCpu) {
  SKIP_WITHOUT_TESTED_DEVICE();
  expect_every_rank_ends_well("differences_of_two_ranks");
}

TEST(TwoRanks, GoOnAfterFailedBackwards) {
  SKIP_WITHOUT_TESTED_DEVICE();
  expect_every_rank_ends_well("failed_backwards_of_two_ranks");
}

}  // namespace
}  // namespace fsdp::testing
