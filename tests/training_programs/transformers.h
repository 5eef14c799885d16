// Training of the example's transformer with what a run on GPUs uses. AdamW's eps is
// large enough that rounding is not divided by rounding.
#pragma once

#include "tests/training_programs/program_rank.h"

#include <string>

namespace fsdp::testing {

// Clipped gradients, a forward that runs again in backward.
void train_transformer(ProgramRank& rank);
// Half precision with a scaled loss.
void train_transformer_in_half(ProgramRank& rank);
// Tensor parallelism over all ranks, beside a data-parallel dimension of one.
void train_tensor_parallel_transformer(ProgramRank& rank);
// Saves to `folder`, which all ranks share, loads into another model and goes on there.
// REQUIRES: ranks that reach each other.
TrainingProgram training_that_is_resumed(const std::string& folder);

}  // namespace fsdp::testing
