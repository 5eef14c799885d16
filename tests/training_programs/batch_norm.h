// Batch norm of DTensors, for which LibTorch has kernels that it chooses by the device.
#pragma once

#include "tests/training_programs/program_rank.h"

namespace fsdp::testing {

// Two steps over images whose batch is cut, then an evaluation: outputs, gradients and
// running statistics.
void normalize_a_cut_batch(ProgramRank& rank);

}  // namespace fsdp::testing
