// What the page of a run tells of the units of a sharded model.
#pragma once

#include "examples/run_report/unit_facts.h"
#include "examples/training.h"

#include <cstdint>
#include <vector>

namespace examples {

// Those with parameters, in the order of fsdp_modules(). data_ranks: of data_mesh_of().
// Local.
std::vector<run_report::UnitFacts> facts_of_units(torch::nn::Module& model,
                                                  const TrainingOptions& options,
                                                  int64_t data_ranks);

}  // namespace examples
