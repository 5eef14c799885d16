// Byte-level text: every byte of a file, or of all text files under a folder, is one
// token of a 256-token vocabulary.
#pragma once

#include "examples/tokens.h"

#include <string>

namespace examples {

class TextData final : public Tokens {
 public:
  // Reads `path` into memory. Throws ValueError when it cannot be read or has fewer than
  // 64 KiB of text.
  explicit TextData(const std::string& path);

  int64_t size() const override { return bytes_.numel(); }
  at::Tensor read(int64_t first, int64_t count, int64_t vocab) const override;

 private:
  std::string path_;
  at::Tensor bytes_;  // uint8
};

// The headers of the LibTorch that this process runs on: tens of megabytes of C++ that
// every user of this library has. Throws ValueError when they are not beside its
// libraries.
std::string default_text_folder();

// Text <-> tokens, one per byte: int64 [bytes] on the CPU.
at::Tensor encode(const std::string& text);
std::string decode(const at::Tensor& tokens);

}  // namespace examples
