// What tools/plan tells beside what steps take on a device that counts, with all values
// computed by all ranks.
#include "programs/planner/measured_step.h"
#include "programs/trainer/hugging_face/hugging_face_config.h"
#include "programs/trainer/setup/sharded_model.h"
#include "tests/simulated_accelerator/machine.h"
#include "tests/simulated_accelerator/move_module.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/support/default_generator.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using namespace simulated;
using programs::MeasuredStep;
using programs::TrainingOptions;
using Json = nlohmann::json;

constexpr const char* kConfig = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_act": "silu", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3,
  "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 112,
  "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
  "tie_word_embeddings": false})";

// One way to train, in flags of tools/plan and in options.
struct PlannedCase {
  std::string flags;
  int64_t ranks;
  TrainingOptions options;
};

std::ostream& operator<<(std::ostream& out, const PlannedCase& planned) {
  return out << planned.flags << " on " << planned.ranks;
}

TrainingOptions in_bf16(TrainingOptions options) {
  options.sharding.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  return options;
}

std::vector<PlannedCase> cases() {
  std::vector<PlannedCase> all;
  TrainingOptions kept, recomputed;
  kept.sharding.reshard_after_forward = false;
  kept.clip = 1;
  recomputed.checkpoint_activations = true;
  recomputed.accumulate = 2;
  for (const int64_t ranks : {1, 2, 4}) {
    all.push_back({"", ranks, {}});
    all.push_back({"--reshard_after_forward=false --clip=1 --param_dtype=bf16 --reduce_dtype=f32",
                   ranks, in_bf16(kept)});
    all.push_back({"--checkpoint_activations --accumulate=2", ranks, recomputed});
  }
  TrainingOptions hybrid, parallel, to_world;
  hybrid.replicas = 2;
  parallel.tp = 2;
  to_world.sharding.reshard_after_forward = ReshardAfterForward::to_world(2);
  all.push_back({"--replicas=2", 4, hybrid});
  all.push_back({"--tp=2", 4, parallel});
  all.push_back({"--reshard_after_forward=2", 4, to_world});
  return all;
}

std::string plan_program() {
  const std::string in_runfiles = "programs/planner/plan_training";
  return std::filesystem::is_regular_file(in_runfiles) ? "./" + in_runfiles
                                                       : "bazel-bin/programs/planner/plan_training";
}

Json planned(const std::string& folder, const PlannedCase& one, int64_t rank) {
  const auto command = plan_program() + " --json --attention=composed --tokens=24 --batch=3" +
                       " --config=" + folder + " --ranks=" + std::to_string(one.ranks) +
                       " --rank=" + std::to_string(rank) + " " + one.flags;
  FILE* const output = popen(command.c_str(), "r");
  std::string text;
  for (int c = fgetc(output); c != EOF; c = fgetc(output)) text.push_back(static_cast<char>(c));
  EXPECT_EQ(pclose(output), 0) << command;
  return Json::parse(text);
}

programs::DeviceCounters counters_of(c10::Device device) {
  auto& machine = Machine::instance();
  return {
      .memory = [&machine, device] { return machine.counters(device.index()).requested_bytes; },
      .peak = [&machine, device] { return machine.counters(device.index()).peak_requested_bytes; },
      .reset_peak = [&machine, device] { machine.forget_peak(device.index()); },
      .flops = {}};
}

std::vector<MeasuredStep> measured(TrainingOptions options, int64_t ranks) {
  options.device = kDeviceType;
  std::vector<MeasuredStep> steps(static_cast<size_t>(ranks));
  const auto body = [&](int64_t rank) {
    const auto make = [&] {
      auto model = drawn_from_seed(1, [&] { return programs::Transformer(options.model); });
      move_to(*model, device(rank));
      return model;
    };
    steps[static_cast<size_t>(rank)] =
        measure_step(make, options, mesh_of(options, ranks), counters_of(device(rank)));
  };
  run_in({}, [&] { run_ranks_on_devices(ranks, std::make_shared<World>(), body); });
  return steps;
}

void expect_close(const Json& plan, int64_t real, const char* what) {
  EXPECT_NEAR(plan.at(what).get<double>(), static_cast<double>(real),
              0.01 * static_cast<double>(real))
      << what;
}

void expect_same_traffic(const Json& plan, const std::vector<programs::Traffic>& real) {
  ASSERT_EQ(plan.size(), real.size());
  for (size_t i = 0; i < real.size(); ++i) {
    SCOPED_TRACE(real[i].dim + " " + real[i].collective);
    EXPECT_EQ(plan[i].at("dim"), real[i].dim);
    EXPECT_EQ(plan[i].at("collective"), real[i].collective);
    EXPECT_EQ(plan[i].at("group"), real[i].group);
    EXPECT_EQ(plan[i].at("count"), real[i].count);
    EXPECT_EQ(plan[i].at("bytes"), real[i].bytes);
  }
}

class PlannedMemory : public ::testing::TestWithParam<PlannedCase> {};

TEST_P(PlannedMemory, IsWhatADeviceCounts) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() + "/config.json") << kConfig;
  auto options = GetParam().options;
  options.model = programs::hugging_face_config(folder.path());
  options.batch = 3;
  options.tokens = 24;
  const auto steps = measured(options, GetParam().ranks);
  for (const int64_t rank : {int64_t{0}, GetParam().ranks - 1}) {
    SCOPED_TRACE(rank);
    const auto plan = planned(folder.path(), GetParam(), rank);
    const auto& real = steps[static_cast<size_t>(rank)];
    const auto& memory = plan.at("memory");
    expect_close(memory, real.memory.peak, "peak");
    expect_close(memory, real.memory.parameters, "parameters");
    expect_close(memory, real.memory.gradients, "gradients");
    expect_close(memory, real.memory.optimizer, "optimizer");
    expect_close(memory, real.memory.activations, "activations");
    expect_close(memory, real.memory.sharding_peak, "sharding_peak");
    EXPECT_EQ(memory.at("peak_phase"), name(real.memory.peak_phase));
    expect_same_traffic(plan.at("traffic"), real.traffic);
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, PlannedMemory, ::testing::ValuesIn(cases()));

}  // namespace
}  // namespace fsdp::testing
