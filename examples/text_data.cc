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
constexpr size_t kLargestSpan = size_t{64} << 10;
constexpr size_t kHeldOutPeriod = 20;  // one span in so many is held out

enum Stream : uint64_t { kTraining = 1, kHeldOut = 2 };

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

// The finaliser of splitmix64: a bijection that scatters neighbouring numbers.
uint64_t scatter(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

int remember_libc10(dl_phdr_info* library, size_t /*size*/, void* path) {
  if (fs::path(library->dlpi_name).filename() == "libc10.so")
    *static_cast<std::string*>(path) = library->dlpi_name;
  return 0;
}

}  // namespace

TextData::TextData(const std::string& path, uint64_t seed) : seed_(seed) {
  TORCH_CHECK_VALUE(fs::exists(path), "--data: no such file or folder: ", path);
  const std::string text = fs::is_directory(path) ? read_folder(path) : read_file(path);
  TORCH_CHECK_VALUE(text.size() >= kSmallestText, "--data: ", path, " has ", text.size(),
                    " bytes of text, at least ", kSmallestText, " are needed");
  const size_t span = std::min(kLargestSpan, text.size() / kHeldOutPeriod);
  std::string training, held_out;
  for (size_t begin = 0, index = 1; begin < text.size(); begin += span, ++index) {
    (index % kHeldOutPeriod == 0 ? held_out : training).append(text, begin, span);
  }
  training_ = bytes(training);
  held_out_ = bytes(held_out);
}

Batch TextData::draw(const at::Tensor& text, uint64_t stream, int64_t step, int64_t rank,
                     int64_t rows, int64_t tokens) const {
  const int64_t starts = text.numel() - tokens;
  TORCH_CHECK_VALUE(starts > 0, "--tokens: ", tokens, " tokens do not fit into ", text.numel(),
                    " bytes of text");
  std::vector<at::Tensor> windows;
  for (int64_t row = rank * rows; row < (rank + 1) * rows; ++row) {
    const uint64_t draw =
        scatter(scatter(scatter(seed_ ^ stream << 32) + uint64_t(step)) + uint64_t(row));
    windows.push_back(text.narrow(0, static_cast<int64_t>(draw % uint64_t(starts)), tokens + 1));
  }
  auto both = at::stack(windows).to(at::kLong);
  return {both.narrow(1, 0, tokens).contiguous(), both.narrow(1, 1, tokens).contiguous()};
}

Batch TextData::training_batch(int64_t step, int64_t rank, int64_t rows, int64_t tokens) const {
  return draw(training_, kTraining, step, rank, rows, tokens);
}

Batch TextData::held_out_batch(int64_t index, int64_t rank, int64_t rows, int64_t tokens) const {
  return draw(held_out_, kHeldOut, index, rank, rows, tokens);
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
