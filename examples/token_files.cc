#include "examples/token_files.h"

#include <ATen/Functions.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

namespace examples {
namespace {

namespace fs = std::filesystem;

// How the tokens lie in a file.
struct TokenFormat {
  at::ScalarType dtype = at::kUInt16;
  int64_t first_byte = 0;
  std::optional<int64_t> tokens = {};  // by the header; none: as many as there are
};

// A file's bytes, as long as it lives.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) : size_(static_cast<size_t>(fs::file_size(path))) {
    if (size_ == 0) return;
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    TORCH_CHECK_VALUE(file >= 0, path, ": ", std::generic_category().message(errno));
    bytes_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    const int error = errno;
    ::close(file);
    TORCH_CHECK_VALUE(bytes_ != MAP_FAILED, path, ": ", std::generic_category().message(error));
  }
  ~MappedFile() {
    if (size_ > 0) ::munmap(bytes_, size_);
  }
  MappedFile(const MappedFile&) = delete;

  int64_t size() const { return static_cast<int64_t>(size_); }
  const char* data() const { return static_cast<const char*>(bytes_); }

 private:
  size_t size_;
  void* bytes_ = nullptr;
};

template <class Number>
Number number_at(const char* bytes) {
  Number number;
  std::memcpy(&number, bytes, sizeof(number));
  return number;
}

std::optional<TokenFormat> llm_c_format(const MappedFile& file, const std::string& path) {
  constexpr int64_t kHeader = 256 * sizeof(int32_t);
  if (file.size() < kHeader) return std::nullopt;
  const auto magic = number_at<int32_t>(file.data());
  if (magic != 20240520 && magic != 20240801) return std::nullopt;
  const auto version = number_at<int32_t>(file.data() + 4);
  TORCH_CHECK_VALUE(version == (magic == 20240520 ? 1 : 7), path, ": version ", version,
                    " of llm.c's format is not known");
  return TokenFormat{.dtype = magic == 20240520 ? at::kUInt16 : at::kUInt32,
                     .first_byte = kHeader,
                     .tokens = number_at<int32_t>(file.data() + 8)};
}

at::ScalarType megatron_dtype(uint8_t code, const std::string& path) {
  switch (code) {
    case 1:
      return at::kByte;
    case 3:
      return at::kShort;
    case 4:
      return at::kInt;
    case 5:
      return at::kLong;
    case 8:
      return at::kUInt16;
    default:
      TORCH_CHECK_VALUE(false, path, ": dtype ", int{code},
                        " of Megatron's index has no tokens; allowed are 1, 3, 4, 5 and 8");
  }
}

// magic, version, dtype, sequences, documents, then int32 lengths of all sequences.
std::optional<TokenFormat> megatron_format(const std::string& path) {
  const auto index_path = fs::path(path).replace_extension(".idx").string();
  if (!fs::exists(index_path)) return std::nullopt;
  constexpr int64_t kHeader = 9 + 8 + 1 + 8 + 8;
  const MappedFile index(index_path);
  TORCH_CHECK_VALUE(index.size() >= kHeader && std::memcmp(index.data(), "MMIDIDX\0\0", 9) == 0,
                    index_path, ": is no index of Megatron's");
  const auto version = number_at<uint64_t>(index.data() + 9);
  TORCH_CHECK_VALUE(version == 1, index_path, ": version ", version, ", allowed is 1");
  const auto sequences = number_at<int64_t>(index.data() + 18);
  TORCH_CHECK_VALUE(sequences >= 0 && index.size() - kHeader >= 12 * sequences, index_path,
                    ": has ", index.size(), " bytes, too few for ", sequences, " sequences");
  int64_t tokens = 0;
  for (int64_t i = 0; i < sequences; ++i)
    tokens += number_at<int32_t>(index.data() + kHeader + 4 * i);
  return TokenFormat{.dtype = megatron_dtype(number_at<uint8_t>(index.data() + 17), index_path),
                     .tokens = tokens};
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

class TokenFile {
 public:
  explicit TokenFile(const std::string& path) : path_(path), file_(path) {
    if (const auto known = llm_c_format(file_, path)) {
      format_ = *known;
    } else if (const auto indexed = megatron_format(path)) {
      format_ = *indexed;
    }
    const auto width = static_cast<int64_t>(c10::elementSize(format_.dtype));
    const auto bytes = file_.size() - format_.first_byte;
    TORCH_CHECK_VALUE(bytes % width == 0, path, ": has ", bytes, " bytes of tokens of ", width,
                      " bytes each, of which the last is not whole");
    TORCH_CHECK_VALUE(!format_.tokens || *format_.tokens == bytes / width, path, ": has ",
                      bytes / width, " tokens where its header says ", *format_.tokens);
    size_ = bytes / width;
  }

  int64_t size() const { return size_; }
  at::Tensor read(int64_t first, int64_t count, int64_t vocab) const {
    const auto width = static_cast<int64_t>(c10::elementSize(format_.dtype));
    const auto* const from = file_.data() + format_.first_byte + first * width;
    // at::from_blob wants what is not const; nobody writes to it.
    const auto tokens =
        at::from_blob(const_cast<char*>(from), {count}, at::TensorOptions(format_.dtype))
            .to(at::kLong);
    const auto* const values = tokens.const_data_ptr<int64_t>();
    const auto* const bad = std::find_if(
        values, values + count, [vocab](int64_t token) { return token < 0 || token >= vocab; });
    TORCH_CHECK_VALUE(bad == values + count, path_, ": token ", first + (bad - values), " is ",
                      bad == values + count ? 0 : *bad, ", and the vocabulary has ", vocab);
    return tokens;
  }

 private:
  std::string path_;
  MappedFile file_;
  TokenFormat format_;
  int64_t size_ = 0;
};

TokenFiles::TokenFiles(const std::string& path) {
  int64_t end = 0;
  for (const auto& each : files_at(path)) {
    files_.push_back(std::make_unique<TokenFile>(each));
    ends_.push_back(end += files_.back()->size());
  }
  TORCH_CHECK_VALUE(end > 0, "--data: ", path, " has no tokens");
}

TokenFiles::~TokenFiles() = default;

at::Tensor TokenFiles::read(int64_t first, int64_t count, int64_t vocab) const {
  std::vector<at::Tensor> parts;
  auto at = std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin();
  for (int64_t left = count; left > 0; ++at) {
    const auto& file = *files_[static_cast<size_t>(at)];
    const auto begin = ends_[static_cast<size_t>(at)] - file.size();
    const auto here = std::min(left, begin + file.size() - first);
    if (here > 0) parts.push_back(file.read(first - begin, here, vocab));
    first += here;
    left -= here;
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

bool TokenFiles::are_at(const std::string& path) {
  const auto files = files_at(path);
  return !files.empty() && fs::path(files.front()).extension() == ".bin" && fs::exists(path);
}

}  // namespace examples
