#include "programs/trainer/data/text_data.h"

#include <ATen/Functions.h>
#include <link.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

namespace programs {
namespace {

namespace fs = std::filesystem;

constexpr size_t kSmallestText = size_t{64} << 10;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file.good(), "--data: cannot read ", path.string());
  std::string text;
  std::vector<char> chunk(size_t{1} << 16);
  while (file) {
    file.read(chunk.data(), static_cast<std::streamsize>(chunk.size()));
    text.append(chunk.data(), static_cast<size_t>(file.gcount()));
  }
  TORCH_CHECK_VALUE(!file.bad(), "--data: cannot read ", path.string());
  return text;
}

bool is_text(const std::string& content) { return content.find('\0') == std::string::npos; }

// The same on every rank.
std::vector<fs::path> files_of_text(const fs::path& path) {
  if (!fs::is_directory(path)) return {path};
  std::vector<fs::path> paths;
  for (const auto& entry :
       fs::recursive_directory_iterator(path, fs::directory_options::skip_permission_denied)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

int remember_libc10(dl_phdr_info* library, size_t /*size*/, void* path) {
  if (fs::path(library->dlpi_name).filename() == "libc10.so")
    *static_cast<std::string*>(path) = library->dlpi_name;
  return 0;
}

}  // namespace

TextData::TextData(const std::string& path, const Tokenizer& tokenizer)
    : path_(path), vocab_(tokenizer.vocab()) {
  TORCH_CHECK_VALUE(fs::exists(path), "--data: no such file or folder: ", path);
  std::vector<at::Tensor> documents;
  size_t bytes = 0;
  int64_t end = 0;
  for (const auto& file : files_of_text(path)) {
    const std::string text = read_file(file);
    if (text.empty() || (fs::is_directory(path) && !is_text(text))) continue;
    bytes += text.size();
    auto tokens = tokenizer.encode(text);
    if (tokens.numel() == 0) continue;  // it would begin where the next one does
    documents.push_back(std::move(tokens));
    begins_.push_back(end);
    end += documents.back().numel();
  }
  TORCH_CHECK_VALUE(bytes > 0 || !fs::is_directory(path), "--data: ", path,
                    " has no file of text, nor one of tokens (*.bin)");
  TORCH_CHECK_VALUE(bytes >= kSmallestText, "--data: ", path, " has ", bytes,
                    " bytes of text, at least ", kSmallestText, " are needed");
  TORCH_CHECK_VALUE(!documents.empty(), "--data: ", path, " has ", bytes,
                    " bytes of text, and no token of them");
  tokens_ = documents.size() == 1 ? documents.front() : at::cat(documents);
}

at::Tensor TextData::read(int64_t first, int64_t count, int64_t vocab) const {
  TORCH_CHECK_VALUE(vocab >= vocab_, "--data: ", path_, " is text, whose tokens need a vocabulary ",
                    "of ", vocab_, "; the model's is ", vocab);
  return tokens_.narrow(0, first, count).to(at::kLong);
}

std::string default_text_folder() {
  std::string library;
  dl_iterate_phdr(remember_libc10, &library);
  const fs::path folder = fs::path(library).parent_path().parent_path() / "include";
  TORCH_CHECK_VALUE(!library.empty() && fs::is_directory(folder), "--data: name a file or folder; ",
                    folder.string(), " with the LibTorch headers, the default, does not exist");
  return folder.string();
}

}  // namespace programs
