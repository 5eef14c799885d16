#include "programs/trainer/data/megatron_index.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <filesystem>

namespace programs {
namespace {

constexpr int64_t kIndexHeader = 9 + 8 + 1 + 8 + 8;  // bytes

std::string index_of(const std::string& tokens_path) {
  return std::filesystem::path(tokens_path).replace_extension(".idx").string();
}

}  // namespace

bool MegatronIndex::is_beside(const std::string& tokens_path) {
  return std::filesystem::exists(index_of(tokens_path));
}

MegatronIndex::MegatronIndex(const std::string& tokens_path)
    : path_(index_of(tokens_path)), file_(path_) {
  TORCH_CHECK_VALUE(
      file_.size() >= kIndexHeader && std::memcmp(file_.data(), "MMIDIDX\0\0", 9) == 0, path_,
      ": is no index of Megatron's");
  const auto version = number_at<uint64_t>(file_.data() + 9);
  TORCH_CHECK_VALUE(version == 1, path_, ": version ", version, ", allowed is 1");
  sequences_ = number_at<int64_t>(file_.data() + 18);
  TORCH_CHECK_VALUE(sequences_ >= 0 && (file_.size() - kIndexHeader) / 12 >= sequences_, path_,
                    ": has ", file_.size(), " bytes, too few for ", sequences_, " sequences");
  TORCH_CHECK_VALUE(
      documents() >= 0 && (file_.size() - kIndexHeader - 12 * sequences_) / 8 >= documents(), path_,
      ": has ", file_.size(), " bytes, too few for ", documents(), " documents");
}

int64_t MegatronIndex::documents() const { return number_at<int64_t>(file_.data() + 26); }

c10::ScalarType MegatronIndex::dtype() const {
  const auto code = number_at<uint8_t>(file_.data() + 17);
  switch (code) {
    case 1:
      return c10::kByte;
    case 3:
      return c10::kShort;
    case 4:
      return c10::kInt;
    case 5:
      return c10::kLong;
    case 8:
      return c10::kUInt16;
    default:
      TORCH_CHECK_VALUE(false, path_, ": dtype ", int{code},
                        " of Megatron's index has no tokens; allowed are 1, 3, 4, 5 and 8");
  }
}

int64_t MegatronIndex::tokens() const {
  int64_t tokens = 0;
  for (int64_t i = 0; i < sequences_; ++i)
    tokens += number_at<int32_t>(file_.data() + kIndexHeader + 4 * i);
  return tokens;
}

std::vector<int64_t> MegatronIndex::document_begins() const {
  const char* const first_sequences = file_.data() + kIndexHeader + 12 * sequences_;
  std::vector<int64_t> begins;
  int64_t sequence = 0, token = 0;
  for (int64_t i = 0; i < documents(); ++i) {
    const auto first = number_at<int64_t>(first_sequences + 8 * i);
    TORCH_CHECK_VALUE(first >= sequence && first <= sequences_, path_, ": document ", i,
                      " begins with sequence ", first, ", allowed are ", sequence, " to ",
                      sequences_);
    for (; sequence < first; ++sequence)
      token += number_at<int32_t>(file_.data() + kIndexHeader + 4 * sequence);
    if (!begins.empty() && begins.back() == token) continue;  // the one before is empty
    begins.push_back(token);
  }
  TORCH_CHECK_VALUE(documents() > 0 && sequence == sequences_, path_, ": its documents have ",
                    sequence, " sequences, and there are ", sequences_);
  begins.pop_back();
  return begins;
}

}  // namespace programs
