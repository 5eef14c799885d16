// What a run trains on, from its options.
#pragma once

#include "examples/batches.h"
#include "examples/tokenizer.h"
#include "examples/training.h"

#include <memory>

namespace examples {

// How text is encoded; null where the data are files of tokens. Local. Throws as
// tokenizer_of.
std::unique_ptr<Tokenizer> tokenizer_for(const TrainingOptions& options);

// `tokenizer`: what tokenizer_for gave. Local. Throws as tokens_of and Batches.
Batches batches_for(const TrainingOptions& options, const Tokenizer* tokenizer);

}  // namespace examples
