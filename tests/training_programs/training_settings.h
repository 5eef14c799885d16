// Training with the settings that lead gradients and parameters other ways.
#pragma once

#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "tests/training_programs/program_rank.h"

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace fsdp::testing {

struct Setting {
  std::string name;
  std::vector<int64_t> mesh = {4};
  FullyShardOptions options = {};
  // Before backward `micro` of a step, of two.
  std::function<void(FSDPModule root, int micro)> before_backward = [](FSDPModule, int) {};
};

void PrintTo(const Setting& setting, std::ostream* out);

// Steps of SGD on a model of three layers, each of two backwards.
TrainingProgram training_with(const Setting& setting);

// Each of four ranks.
std::vector<Setting> training_settings();

}  // namespace fsdp::testing
