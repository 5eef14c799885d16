#include "programs/trainer/data/token_files.h"

#include "programs/trainer/data/mapped_file.h"
#include "programs/trainer/data/megatron_index.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <utility>

namespace programs {
namespace {

namespace fs = std::filesystem;

// How the tokens lie in a file.
struct TokenFormat {
  std::string name = "nanoGPT's, which begin with the first token";
  at::ScalarType dtype = at::kUInt16;
  int64_t first_byte = 0;
  std::optional<int64_t> tokens = {};  // by the header; none: as many as there are
};

std::optional<TokenFormat> llm_c_format(const MappedFile& file, const std::string& path) {
  constexpr int64_t kHeader = 256 * sizeof(int32_t);
  if (file.size() < kHeader) return std::nullopt;
  const auto magic = number_at<int32_t>(file.data());
  if (magic != 20240520 && magic != 20240801) return std::nullopt;
  const auto version = number_at<int32_t>(file.data() + 4);
  TORCH_CHECK_VALUE(version == (magic == 20240520 ? 1 : 7), path, ": version ", version,
                    " of llm.c's format is not known");
  return TokenFormat{.name = "llm.c's",
                     .dtype = magic == 20240520 ? at::kUInt16 : at::kUInt32,
                     .first_byte = kHeader,
                     .tokens = number_at<int32_t>(file.data() + 8)};
}

std::vector<std::string> files_at(const std::string& path) {
  if (!fs::is_directory(path)) return {path};
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.is_regular_file() && entry.path().extension() == ".bin")
      paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

// One file of tokens.
class TokenFile {
 public:
  explicit TokenFile(const std::string& path) : path_(path), file_(path) {
    if (const auto known = llm_c_format(file_, path)) {
      format_ = *known;
    } else if (MegatronIndex::is_beside(path)) {
      index_.emplace(path);
      format_ = {.name = "Megatron's", .dtype = index_->dtype(), .tokens = index_->tokens()};
    }
    const auto width = static_cast<int64_t>(c10::elementSize(format_.dtype));
    const auto bytes = file_.size() - format_.first_byte;
    TORCH_CHECK_VALUE(bytes % width == 0, path, ": has ", bytes, " bytes of tokens of ", width,
                      " bytes each, of which the last is not whole (read as ", format_.name, ")");
    TORCH_CHECK_VALUE(!format_.tokens || *format_.tokens == bytes / width, path, ": has ",
                      bytes / width, " tokens where its header says ", *format_.tokens);
    size_ = bytes / width;
  }

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  const std::optional<MegatronIndex>& index() const { return index_; }
  bool tells_its_format() const { return format_.tokens.has_value(); }

  at::Tensor read(int64_t first, int64_t count, int64_t vocab) const {
    const auto tokens = numbers(first, count);
    const auto* const values = tokens.const_data_ptr<int64_t>();
    const auto* const bad = std::find_if(
        values, values + count, [vocab](int64_t token) { return token < 0 || token >= vocab; });
    TORCH_CHECK_VALUE(bad == values + count, path_, ": token ", first + (bad - values), " is ",
                      bad == values + count ? 0 : *bad, ", and the vocabulary has ", vocab);
    return tokens;
  }

  // int64 [count], whatever they are.
  at::Tensor numbers(int64_t first, int64_t count) const {
    const auto width = static_cast<int64_t>(c10::elementSize(format_.dtype));
    const auto* const from = file_.data() + format_.first_byte + first * width;
    // at::from_blob wants what is not const; nobody writes to it.
    return at::from_blob(const_cast<char*>(from), {count}, at::TensorOptions(format_.dtype))
        .to(at::kLong);
  }

 private:
  std::string path_;
  MappedFile file_;
  std::optional<MegatronIndex> index_;
  TokenFormat format_;
  int64_t size_ = 0;
};

TokenFiles::TokenFiles(const std::string& path, const std::optional<DocumentMarks>& marks)
    : marks_(marks.value_or(DocumentMarks())) {
  int64_t end = 0;
  for (const auto& each : files_at(path)) {
    const auto& file = *files_.emplace_back(std::make_unique<TokenFile>(each));
    TORCH_CHECK_VALUE(!marks || marks->end || file.index(), "--documents: separate needs ",
                      "--end_of_document, the last token of each document, for ", file.path(),
                      " has no index (.idx) that tells of documents");
    if (marks && file.index())
      for (const int64_t begin : file.index()->document_begins()) begins_.push_back(end + begin);
    ends_.push_back(end += file.size());
  }
  TORCH_CHECK_VALUE(end > 0, "--data: ", path, " has no tokens");
  check_indices();
}

// A file that has lost its index would be read as nanoGPT's.
void TokenFiles::check_indices() const {
  const auto with = std::find_if(files_.begin(), files_.end(),
                                 [](const auto& file) { return file->index().has_value(); });
  const auto lost = std::find_if(files_.begin(), files_.end(),
                                 [](const auto& file) { return !file->tells_its_format(); });
  TORCH_CHECK_VALUE(with == files_.end() || lost == files_.end(), (*lost)->path(),
                    ": has no index (.idx) of Megatron's, and ", (*with)->path(), " has one");
}

TokenFiles::~TokenFiles() = default;

template <class Visit>
void TokenFiles::for_each_part(int64_t first, int64_t count, const Visit& visit) const {
  auto at = std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin();
  for (int64_t left = count; left > 0; ++at) {
    const auto& file = *files_[static_cast<size_t>(at)];
    const auto begin = ends_[static_cast<size_t>(at)] - file.size();
    const auto here = std::min(left, begin + file.size() - first);
    if (here > 0) visit(file, first - begin, here);
    first += here;
    left -= here;
  }
}

at::Tensor TokenFiles::read(int64_t first, int64_t count, int64_t vocab) const {
  std::vector<at::Tensor> parts;
  for_each_part(first, count, [&](const TokenFile& file, int64_t from, int64_t tokens) {
    parts.push_back(file.read(from, tokens, vocab));
  });
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

// The token before a place says whether the one before has ended there.
std::vector<int64_t> TokenFiles::document_begins(int64_t first, int64_t count) const {
  auto begins = places_in(begins_, first, count);
  if (!marks_.end) return begins;
  if (first == 0 && count > 0) begins.push_back(0);
  int64_t place = std::max<int64_t>(first, 1);
  for_each_part(place - 1, first + count - place,
                [&](const TokenFile& file, int64_t from, int64_t tokens) {
                  const auto numbers = file.numbers(from, tokens);
                  const auto* const token = numbers.const_data_ptr<int64_t>();
                  for (int64_t i = 0; i < tokens; ++i, ++place)
                    if (token[i] == *marks_.end) begins.push_back(place);
                });
  std::sort(begins.begin(), begins.end());
  begins.erase(std::unique(begins.begin(), begins.end()), begins.end());
  return begins;
}

bool TokenFiles::are_at(const std::string& path) {
  const auto files = files_at(path);
  return !files.empty() && fs::path(files.front()).extension() == ".bin" && fs::exists(path);
}

}  // namespace programs
