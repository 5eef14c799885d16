// A text as a model sees it: a long row of tokens, from which batches are cut
// (batches.h). Where it comes from is up to whoever implements this.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace examples {

class Tokens {
 public:
  virtual ~Tokens() = default;
  virtual int64_t size() const = 0;
  // int64 [count], on the CPU. REQUIRES: 0 <= first, first + count <= size(). Throws
  // ValueError for a token of `vocab` or more, with the file and the place.
  virtual at::Tensor read(int64_t first, int64_t count, int64_t vocab) const = 0;
};

// Of a file of tokens (*.bin) or a folder with such files, what token_files.h reads; of
// all else the bytes of text (text_data.h). Throws ValueError.
std::unique_ptr<Tokens> tokens_of(const std::string& path);

}  // namespace examples
