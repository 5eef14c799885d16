// A text as a model sees it: a long row of tokens, from which batches are cut
// (batches.h). Where it comes from is up to whoever implements this.
#pragma once

#include "programs/trainer/data/tokenizer.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace programs {

class Tokens {
 public:
  virtual ~Tokens() = default;
  virtual int64_t size() const = 0;
  // int64 [count], on the CPU. REQUIRES: 0 <= first, first + count <= size(). Throws
  // ValueError for a token of `vocab` or more, with the file and the place.
  virtual at::Tensor read(int64_t first, int64_t count, int64_t vocab) const = 0;
  // The places of first ... first + count at which a document begins, ascending. REQUIRES
  // as read.
  virtual std::vector<int64_t> document_begins(int64_t first, int64_t count) const = 0;
};

// What tells of documents in files of tokens.
struct DocumentMarks {
  // The last token of each, such as GPT-2's 50256; none: Megatron's indices alone do.
  std::optional<int64_t> end = {};
};

// Of a file of tokens (*.bin) or a folder with such files, what token_files.h reads,
// which is told of `marks` where documents matter; of all else text, whose files are its
// documents (text_data.h), by `tokenizer`, which text alone needs. Throws ValueError.
std::unique_ptr<Tokens> tokens_of(const std::string& path, const Tokenizer* tokenizer,
                                  const std::optional<DocumentMarks>& marks);

// Those of `sorted` that are in first ... first + count.
std::vector<int64_t> places_in(const std::vector<int64_t>& sorted, int64_t first, int64_t count);

}  // namespace programs
