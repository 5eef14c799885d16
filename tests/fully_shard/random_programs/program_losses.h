// The forwards of a random program's actions, on a sharded model or a plain one.
#pragma once

#include "tests/fully_shard/random_programs/random_model.h"
#include "tests/fully_shard/random_programs/random_program.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::testing {

// [2, width] where the model is, the same for the same seed and rank. The host does not
// wait for it.
at::Tensor make_input(const Program& program, const RandomModel& model, uint64_t seed,
                      int64_t rank);

// The losses of one action, to be run backward one after another, and the inputs whose
// gradients they give.
struct Losses {
  std::vector<at::Tensor> losses, inputs;
  bool retain_graph = false;
  at::Tensor evaluated = {};  // the output of an evaluation before the backwards
};
Losses forward_losses(const Program& program, const RandomModel& model, const Action& action,
                      int64_t rank);

// An evaluation's loss of an output, and small shares of the squares of all parameters,
// as their registry entries have them. Where no gradients are recorded.
at::Tensor metric_of(const RandomModel& model, const at::Tensor& output);

// Runs an action that is to throw at its target, in forward or backward. True when the
// exception came; it does not where the target is not reached.
bool throws_as_planned(const Program& program, const RandomModel& model, const Action& action,
                       int64_t rank);

}  // namespace fsdp::testing
