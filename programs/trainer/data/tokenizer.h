// Text to tokens and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace programs {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocab() const = 0;  // all tokens are below
  // uint8 or int32 [tokens], on the CPU.
  virtual at::Tensor encode(const std::string& text) const = 0;
  // tokens: integers [tokens], on any device.
  virtual std::string decode(const at::Tensor& tokens) const = 0;
};

// Every byte is a token.
class Bytes final : public Tokenizer {
 public:
  int64_t vocab() const override { return 256; }
  at::Tensor encode(const std::string& text) const override;
  std::string decode(const at::Tensor& tokens) const override;
};

// That of a folder of Hugging Face's: SentencePiece where it has tokenizer.model
// (sentence_piece.h), bytes where it has no tokenizer or `folder` is empty. Throws
// ValueError where it has another kind, or one with more tokens than `vocab`, the
// model's. Local.
std::unique_ptr<Tokenizer> tokenizer_of(const std::string& folder, int64_t vocab);

// For a terminal, which control characters and what is no UTF-8, as an early model writes
// them, would garble: these bytes are '?' instead.
std::string printable(const std::string& text);

}  // namespace programs
