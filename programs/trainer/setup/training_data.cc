#include "programs/trainer/setup/training_data.h"

#include "programs/trainer/data/token_files.h"

#include <optional>

namespace programs {

std::unique_ptr<Tokenizer> tokenizer_for(const TrainingOptions& options) {
  if (TokenFiles::are_at(options.data)) return nullptr;
  return tokenizer_of(options.init_from, options.model.vocab);
}

Batches batches_for(const TrainingOptions& options, const Tokenizer* tokenizer) {
  std::optional<DocumentMarks> marks;
  if (options.packing == Packing::kSeparate) marks = {.end = options.end_of_document};
  return {tokens_of(options.data, tokenizer, marks),
          {.seed = options.seed,
           .tokens = options.tokens,
           .vocab = options.model.vocab,
           .packing = options.packing}};
}

}  // namespace programs
