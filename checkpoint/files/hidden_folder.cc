#include "checkpoint/files/hidden_folder.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr size_t kIdDigits = 16;

using Hidden = HiddenFolder::Kind;
constexpr std::array<std::pair<Hidden, std::string_view>, 3> kWords = {
    {{Hidden::kSaving, ".saving-"}, {Hidden::kOld, ".old-"}, {Hidden::kRemoving, ".removing-"}}};

constexpr std::string_view kRemoving = ".removing";  // how version 0.1 called it

bool is_id(std::string_view text) {
  return text.size() == kIdDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::optional<HiddenFolder> hidden_folder(const fs::path& path) {
  const std::string name = path.filename().string();
  if (name.front() != '.') return std::nullopt;
  if (name.size() > 1 + kRemoving.size() && name.ends_with(kRemoving)) {
    const std::string place = name.substr(1, name.size() - 1 - kRemoving.size());
    return HiddenFolder{path.string(), Hidden::kRemoving, (path.parent_path() / place).string()};
  }
  for (const auto& [kind, word] : kWords) {
    const size_t at = name.rfind(word);
    if (at == std::string::npos || at < 2 || !is_id(name.substr(at + word.size()))) continue;
    const fs::path place = path.parent_path() / name.substr(1, at - 1);
    return HiddenFolder{.path = path.string(), .kind = kind, .place = place.string()};
  }
  return std::nullopt;
}

}  // namespace

std::string hidden_path(const std::string& place, Hidden kind, const std::string& id) {
  const auto* const word = std::find_if(kWords.begin(), kWords.end(),
                                        [&](const auto& each) { return each.first == kind; });
  const fs::path path(place);
  const std::string name = "." + path.filename().string() + std::string(word->second) + id;
  return (path.parent_path() / name).string();
}

std::vector<HiddenFolder> hidden_folders_in(const std::string& directory) {
  std::vector<HiddenFolder> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    auto folder = hidden_folder(entry.path());
    if (folder && entry.is_directory(error) && !entry.is_symlink(error)) {
      found.push_back(*std::move(folder));
    }
  }
  std::sort(found.begin(), found.end(),
            [](const HiddenFolder& a, const HiddenFolder& b) { return a.path < b.path; });
  return found;
}

}  // namespace fsdp::internal::checkpoint
