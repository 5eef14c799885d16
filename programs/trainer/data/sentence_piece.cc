#include "programs/trainer/data/sentence_piece.h"

#include <ATen/Functions.h>
#include <nlohmann/json.hpp>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

namespace programs {
namespace {

namespace fs = std::filesystem;

bool wants_bos(const fs::path& config_path) {
  std::ifstream file(config_path);
  if (!file) return true;
  const auto config = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(config.is_object(), config_path.string(), ": is no JSON object");
  const auto found = config.find("add_bos_token");
  return found == config.end() || *found != false;
}

}  // namespace

bool SentencePiece::is_in(const std::string& folder) {
  return fs::exists(fs::path(folder) / "tokenizer.model");
}

SentencePiece::SentencePiece(const std::string& folder)
    : path_((fs::path(folder) / "tokenizer.model").string()),
      processor_(std::make_unique<sentencepiece::SentencePieceProcessor>()),
      begins_with_bos_(wants_bos(fs::path(folder) / "tokenizer_config.json")) {
  const auto loaded = processor_->Load(path_);
  TORCH_CHECK_VALUE(loaded.ok(), path_,
                    ": is no whole model of SentencePiece's: ", loaded.message());
  begins_with_bos_ = begins_with_bos_ && processor_->bos_id() >= 0;
}

SentencePiece::~SentencePiece() = default;

int64_t SentencePiece::vocab() const { return processor_->GetPieceSize(); }

at::Tensor SentencePiece::encode(const std::string& text) const {
  std::vector<int> ids;
  const auto encoded = processor_->Encode(text, &ids);
  TORCH_CHECK_VALUE(encoded.ok(), path_, ": cannot encode a text: ", encoded.message());
  if (begins_with_bos_) ids.insert(ids.begin(), processor_->bos_id());
  return at::tensor(ids, at::kInt);
}

std::string SentencePiece::decode(const at::Tensor& tokens) const {
  const auto numbers = tokens.to(at::kCPU, at::kInt).contiguous();
  const auto* const first = numbers.const_data_ptr<int32_t>();
  std::vector<int> ids(first, first + numbers.numel());
  std::replace_if(
      ids.begin(), ids.end(), [this](int id) { return id < 0 || id >= vocab(); },
      processor_->unk_id());
  std::string text;
  const auto decoded = processor_->Decode(ids, &text);
  TORCH_CHECK_VALUE(decoded.ok(), path_, ": cannot decode tokens: ", decoded.message());
  return text;
}

}  // namespace programs
