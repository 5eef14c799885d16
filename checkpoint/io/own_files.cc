#include "checkpoint/io/own_files.h"

#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/io/shard_writer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <set>
#include <string_view>
#include <system_error>

namespace fsdp::internal::checkpoint {
namespace {

namespace fs = std::filesystem;

using IsOwn = std::function<bool(const std::string& path)>;

// Of the names that a save gives its files, the manifest and the lock apart.
constexpr std::array<std::string_view, 3> kOwnSuffixes = {".safetensors", ".safetensors.xxh3",
                                                          ".safetensors.index.json"};

bool is_mark(const std::string& path) { return path == kManifestName || path == kLockName; }

bool has_name_of_save(const std::string& path) {
  return std::any_of(kOwnSuffixes.begin(), kOwnSuffixes.end(),
                     [&](std::string_view suffix) { return path.ends_with(suffix); });
}

void sort_out(const std::string& folder, const std::string& below, const IsOwn& is_own,
              OwnFiles& own) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(fs::path(folder) / below, error)) {
    const std::string path = (fs::path(below) / entry.path().filename()).string();
    const auto type = entry.symlink_status(error).type();
    if (type == fs::file_type::directory) {
      sort_out(folder, path, is_own, own);
      own.folders.push_back(path);
    } else if (type != fs::file_type::regular) {
      own.others.push_back(path);
    } else if (is_mark(path)) {
      own.marks.push_back(path);
    } else {
      (is_own(path) ? own.files : own.others).push_back(path);
    }
  }
}

OwnFiles sorted_out(const std::string& folder, const IsOwn& is_own) {
  OwnFiles own;
  sort_out(folder, "", is_own, own);
  for (auto* const list : {&own.files, &own.marks, &own.others}) {
    std::sort(list->begin(), list->end());
  }
  return own;
}

// Of a manifest that is undamaged, whatever became of the files it lists.
absl::StatusOr<std::set<std::string>> listed_files(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  const auto text = read_file(path);
  if (!text.ok()) return text.status();
  const auto manifest = parse_manifest(*text, path);
  if (!manifest.ok()) return manifest.status();
  std::set<std::string> listed;
  for (const auto& [name, record] : manifest->files) {
    listed.insert(name);
    listed.insert(name + kChecksumSuffix);
  }
  return listed;
}

OwnFiles all_others(const std::string& folder) {
  OwnFiles own = sorted_out(folder, [](const std::string&) { return false; });
  own.others.insert(own.others.end(), own.marks.begin(), own.marks.end());
  own.marks.clear();
  return own;
}

absl::Status unless_gone(const absl::Status& status) {
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

}  // namespace

OwnFiles files_of_checkpoint(const std::string& folder) {
  const auto listed = listed_files(folder);
  if (!listed.ok()) return all_others(folder);
  return sorted_out(folder, [&](const std::string& path) { return listed->count(path) != 0; });
}

OwnFiles files_of_leftover(const std::string& folder) {
  if (listed_files(folder).ok()) return files_of_checkpoint(folder);
  std::error_code error;
  if (!fs::is_regular_file(fs::symlink_status(folder + "/" + kLockName, error))) {
    return all_others(folder);
  }
  return sorted_out(folder, has_name_of_save);
}

absl::Status remove_own(const std::string& folder, const OwnFiles& own) {
  absl::Status status;
  const auto remove_all_of = [&](const std::vector<std::string>& paths, const auto& remove) {
    for (size_t i = 0; i < paths.size() && status.ok(); ++i) {
      status = unless_gone(remove(folder + "/" + paths[i]));
    }
  };
  remove_all_of(own.files, remove_file);
  remove_all_of(own.folders, remove_directory);
  remove_all_of(own.marks, remove_file);
  return status.ok() ? unless_gone(remove_directory(folder)) : status;
}

std::string others_text(const OwnFiles& own) {
  std::string text = "'" + own.others.front() + "'";
  if (own.others.size() > 1) text += " and " + std::to_string(own.others.size() - 1) + " more";
  return text;
}

}  // namespace fsdp::internal::checkpoint
