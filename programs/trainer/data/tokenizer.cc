#include "programs/trainer/data/tokenizer.h"

#include "programs/trainer/data/sentence_piece.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <filesystem>

namespace programs {
namespace {

// Bytes of the UTF-8 character at the start of `text`; 0: there is none. Forms that are
// longer than needed are taken, too.
size_t character_at(std::string_view text) {
  const auto byte = static_cast<uint8_t>(text.front());
  const size_t bytes = byte < 0x80 ? 1 : byte < 0xc0 ? 0 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
  if (byte >= 0xf8 || bytes > text.size()) return 0;
  const auto goes_on = [](char next) { return (static_cast<uint8_t>(next) & 0xc0) == 0x80; };
  const auto rest = text.substr(1, bytes == 0 ? 0 : bytes - 1);
  return std::all_of(rest.begin(), rest.end(), goes_on) ? bytes : 0;
}

// C0 and C1, from which terminals take commands, and C0 in two bytes.
bool is_control(std::string_view character) {
  const auto first = static_cast<uint8_t>(character.front());
  if (character.size() == 1)
    return (first < ' ' && first != '\n' && first != '\t') || first == 0x7f;
  const bool is_below_a0 =
      first < 0xc2 || (first == 0xc2 && static_cast<uint8_t>(character[1]) < 0xa0);
  return character.size() == 2 && is_below_a0;
}

// A tokenizer that nothing here reads.
std::string foreign_tokenizer(const std::filesystem::path& folder) {
  for (const char* name : {"tokenizer.json", "vocab.json"})
    if (std::filesystem::exists(folder / name)) return name;
  return "";
}

}  // namespace

at::Tensor Bytes::encode(const std::string& text) const {
  auto tokens = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), reinterpret_cast<char*>(tokens.mutable_data_ptr<uint8_t>()));
  return tokens;
}

std::string Bytes::decode(const at::Tensor& tokens) const {
  const auto bytes = tokens.to(at::kCPU, at::kByte).contiguous();
  return {reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()),
          static_cast<size_t>(bytes.numel())};
}

std::unique_ptr<Tokenizer> tokenizer_of(const std::string& folder, int64_t vocab) {
  if (folder.empty()) return std::make_unique<Bytes>();
  if (SentencePiece::is_in(folder)) {
    auto tokenizer = std::make_unique<SentencePiece>(folder);
    TORCH_CHECK_VALUE(tokenizer->vocab() <= vocab, "--init_from: ", folder, "/tokenizer.model has ",
                      tokenizer->vocab(), " tokens, and the model's vocabulary is ", vocab);
    return tokenizer;
  }
  const auto foreign = foreign_tokenizer(folder);
  TORCH_CHECK_VALUE(foreign.empty(), "--data: text for the model of ", folder, ", whose ", foreign,
                    " is read by Python alone (tokenizer.model, SentencePiece's, is read here): "
                    "make a file of tokens as README.md shows, 'From Hugging Face and back'");
  return std::make_unique<Bytes>();
}

std::string printable(const std::string& text) {
  std::string shown;
  for (std::string_view left = text; !left.empty();) {
    const size_t bytes = character_at(left);
    if (bytes == 0 || is_control(left.substr(0, bytes)))
      shown += '?';
    else
      shown += left.substr(0, bytes);
    left.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return shown;
}

}  // namespace programs
