#include "checkpoint/files/file_checks.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <optional>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr std::string_view kZip("PK\3\4", 4);
// The number 0x1950a86a20f9469cfc6c as pickles write it, first in a file of torch.save.
constexpr std::string_view kLegacyMagic("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 12);
constexpr std::string_view kPickle("\x80", 1);
constexpr size_t kMagicIsWithin = 32;

constexpr std::array<std::pair<std::string_view, const char*>, 10> kBeginnings = {{
    {"version https://git-lfs",
     "a Git LFS pointer, not the file that it stands for; 'git lfs pull' fetches that"},
    {"\x1f\x8b", "compressed by gzip; unpack it first"},
    {"BZh", "compressed by bzip2; unpack it first"},
    {"\xfd"
     "7zXZ",
     "compressed by xz; unpack it first"},
    {"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it first"},
    {"\x89HDF", "an HDF5 file, as Keras writes"},
    {"\x93NUMPY", "a NumPy array"},
    {"GGUF", "a GGUF file, of llama.cpp"},
    {"<?xml", "an XML text, as a download that failed leaves it"},
    {"%PDF", "a PDF"},
}};
constexpr std::string_view kTar = "ustar";
constexpr size_t kTarAt = 257;

// A length of less than 4 GiB, little-endian, and the header's brace. The length's first
// byte may be any, a brace too.
bool is_safetensors(std::string_view begin) {
  constexpr std::string_view kHighBytesAndBrace("\0\0\0\0{", 5);
  return begin.size() > 4 && begin.substr(4).starts_with(kHighBytesAndBrace);
}

bool is_web_page(std::string_view begin) {
  const size_t first = begin.find_first_not_of(" \t\r\n");
  std::string text(begin.substr(std::min(first, begin.size())));
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return std::tolower(letter); });
  return text.starts_with("<!doctype html") || text.starts_with("<html") ||
         text.starts_with("<head") || text.starts_with("<body");
}

std::optional<std::string> recognised(std::string_view begin) {
  for (const auto& [beginning, what] : kBeginnings) {
    if (begin.starts_with(beginning)) return what;
  }
  if (is_web_page(begin)) return "a web page (HTML), as a download that failed leaves it";
  if (begin.size() > kTarAt && begin.substr(kTarAt).starts_with(kTar)) {
    return "a tar archive; unpack it, and save anew what torch.save wrote before 0.1.10";
  }
  return std::nullopt;
}

}  // namespace

FileFormat format_of(std::string_view begin) {
  if (is_safetensors(begin)) return FileFormat::kSafetensors;
  if (begin.starts_with(kZip)) return FileFormat::kTorchZip;
  if (begin.substr(0, kMagicIsWithin).find(kLegacyMagic) != std::string_view::npos) {
    return FileFormat::kTorchLegacy;
  }
  return begin.starts_with("{") ? FileFormat::kJson : FileFormat::kOther;
}

std::string describe_format(std::string_view begin) {
  if (begin.empty()) return "an empty file";
  if (auto known = recognised(begin)) return *std::move(known);
  if (begin.starts_with(kPickle)) return "a pickle that torch.save did not write";
  return "neither a safetensors file nor one of torch.save";
}

absl::Status check_is_itself(std::string_view begin, const std::string& path) {
  if (format_of(begin) != FileFormat::kOther) return absl::OkStatus();
  const auto known = recognised(begin);
  return known ? absl::DataLossError(path + ": " + *known) : absl::OkStatus();
}

absl::StatusOr<std::string> beginning_of(const InputFile& file) {
  std::string begin(std::min(kRecognisedBytes, static_cast<size_t>(file.bytes())), '\0');
  const auto read = file.read_at(begin.data(), static_cast<int64_t>(begin.size()), 0);
  if (!read.ok()) return read;
  return begin;
}

bool stays_in_folder(const std::string& name) {
  if (name.empty() || name.front() == '/' || name.find('\0') != std::string::npos) return false;
  std::string_view rest = name, last;
  while (!rest.empty()) {
    const size_t slash = std::min(rest.find('/'), rest.size());
    last = rest.substr(0, slash);
    if (last == "..") return false;
    rest.remove_prefix(std::min(slash + 1, rest.size()));
  }
  return name.back() != '/' && last != ".";
}

std::string outside_of_folder(const std::string& path, const std::string& name,
                              const std::string& tensor) {
  return path + ": it names the file '" + name + "' for '" + tensor +
         "', which lies outside of its folder";
}

}  // namespace fsdp::internal::checkpoint
