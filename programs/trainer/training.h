// Trains the transformer of transformer.h, sharded over the ranks of a job, on text or
// tokens; from a seed, or from a folder of Hugging Face's.
#pragma once

#include "programs/trainer/setup/training_options.h"

namespace programs {

// One rank's part; every rank calls it with the same options. Returns the exit code: 1
// when `compare` found a difference that rounding does not explain. Collective over the
// world.
int train(const TrainingOptions& options);

// Throws ValueError, naming the flag, unless the files of --metrics, --profile and
// --report and the folder of --export can be written, and are none of what the run reads
// or of its checkpoints; where they are not, they are not made.
void check_output_files(const TrainingOptions& options);

}  // namespace programs
