// The tokenizer of Llama 2, Mistral and others whose folders have a tokenizer.model, by
// Google's library SentencePiece.
#pragma once

#include "programs/trainer/data/tokenizer.h"

#include <memory>
#include <string>

namespace sentencepiece {
class SentencePieceProcessor;
}  // namespace sentencepiece

namespace programs {

class SentencePiece final : public Tokenizer {
 public:
  static bool is_in(const std::string& folder);
  // Reads folder/tokenizer.model. Throws ValueError, naming the file, where it is none of
  // SentencePiece's, or not whole.
  explicit SentencePiece(const std::string& folder);
  ~SentencePiece() override;

  int64_t vocab() const override;
  // int32. A text begins with the token for that, if there is one, unless the folder's
  // tokenizer_config.json says "add_bos_token": false, as in transformers. It is encoded
  // as a whole, at about a megabyte a second and with 200 bytes of memory for each of its
  // bytes, so a file of more than some megabytes is better one of tokens.
  at::Tensor encode(const std::string& text) const override;
  // Without tokens for begin and end; tokens that a larger model has besides are unknown.
  std::string decode(const at::Tensor& tokens) const override;

 private:
  std::string path_;
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
  bool begins_with_bos_;
};

}  // namespace programs
