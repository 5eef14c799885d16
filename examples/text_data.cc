#include "examples/text_data.h"

#include <ATen/Functions.h>
#include <link.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

namespace examples {
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

std::string read_folder(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry :
       fs::recursive_directory_iterator(folder, fs::directory_options::skip_permission_denied)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());  // the same text on every rank
  std::string text;
  for (const auto& path : paths) {
    const std::string content = read_file(path);
    if (is_text(content)) text += content;
  }
  return text;
}

at::Tensor bytes(const std::string& text) {
  auto tensor = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), reinterpret_cast<char*>(tensor.mutable_data_ptr<uint8_t>()));
  return tensor;
}

int remember_libc10(dl_phdr_info* library, size_t /*size*/, void* path) {
  if (fs::path(library->dlpi_name).filename() == "libc10.so")
    *static_cast<std::string*>(path) = library->dlpi_name;
  return 0;
}

}  // namespace

TextData::TextData(const std::string& path) : path_(path) {
  TORCH_CHECK_VALUE(fs::exists(path), "--data: no such file or folder: ", path);
  const std::string text = fs::is_directory(path) ? read_folder(path) : read_file(path);
  TORCH_CHECK_VALUE(text.size() >= kSmallestText, "--data: ", path, " has ", text.size(),
                    " bytes of text, at least ", kSmallestText, " are needed");
  bytes_ = bytes(text);
}

at::Tensor TextData::read(int64_t first, int64_t count, int64_t vocab) const {
  TORCH_CHECK_VALUE(vocab >= 256, "--data: ", path_, " is text, whose bytes need a vocabulary of ",
                    "256; the model's is ", vocab);
  return bytes_.narrow(0, first, count).to(at::kLong);
}

std::string default_text_folder() {
  std::string library;
  dl_iterate_phdr(remember_libc10, &library);
  const fs::path folder = fs::path(library).parent_path().parent_path() / "include";
  TORCH_CHECK_VALUE(!library.empty() && fs::is_directory(folder), "--data: name a file or folder; ",
                    folder.string(), " with the LibTorch headers, the default, does not exist");
  return folder.string();
}

at::Tensor encode(const std::string& text) { return bytes(text).to(at::kLong); }

std::string decode(const at::Tensor& tokens) {
  auto narrow = tokens.to(at::kCPU, at::kByte).contiguous();
  return {reinterpret_cast<const char*>(narrow.const_data_ptr<uint8_t>()),
          static_cast<size_t>(narrow.numel())};
}

}  // namespace examples
