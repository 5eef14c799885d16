// What a run trains on, from its options.
#pragma once

#include "programs/trainer/data/batches.h"
#include "programs/trainer/data/tokenizer.h"
#include "programs/trainer/setup/training_options.h"

#include <memory>

namespace programs {

// How text is encoded; null where the data are files of tokens. Local. Throws as
// tokenizer_of.
std::unique_ptr<Tokenizer> tokenizer_for(const TrainingOptions& options);

// `tokenizer`: what tokenizer_for gave. Local. Throws as tokens_of and Batches.
Batches batches_for(const TrainingOptions& options, const Tokenizer* tokenizer);

}  // namespace programs
