// Text, encoded by a tokenizer: a file, or all text files under a folder, in the order of
// their names. Every file is a document.
#pragma once

#include "programs/trainer/data/tokens.h"

#include <cstdint>
#include <string>
#include <vector>

namespace programs {

class TextData final : public Tokens {
 public:
  // Reads and encodes `path` into memory, all of it: every rank does, when it starts.
  // Throws ValueError when it cannot be read or has fewer than 64 KiB of text.
  TextData(const std::string& path, const Tokenizer& tokenizer);

  int64_t size() const override { return tokens_.numel(); }
  at::Tensor read(int64_t first, int64_t count, int64_t vocab) const override;
  std::vector<int64_t> document_begins(int64_t first, int64_t count) const override {
    return places_in(begins_, first, count);
  }

 private:
  std::string path_;
  int64_t vocab_;      // of the tokenizer
  at::Tensor tokens_;  // as the tokenizer gives them
  std::vector<int64_t> begins_;
};

// The headers of the LibTorch that this process runs on: tens of megabytes of C++ that
// every user of this library has. Throws ValueError when they are not beside its
// libraries.
std::string default_text_folder();

}  // namespace programs
