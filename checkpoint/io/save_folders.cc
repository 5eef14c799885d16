#include "checkpoint/io/save_folders.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/manifest.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
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

namespace {

std::string lock_path(const std::string& folder) { return folder + "/" + kLockName; }

}  // namespace

absl::StatusOr<FolderLock> FolderLock::make(const std::string& folder) {
  const std::string path = lock_path(folder);
  FolderLock lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  // It waits for who takes the folder for a dead save's, having come just now, and then
  // removes it.
  if (lock.descriptor_ < 0 || flock(lock.descriptor_, LOCK_EX) != 0) {
    return file_error("lock", path, errno);
  }
  struct stat state {};
  if (fstat(lock.descriptor_, &state) != 0) return file_error("stat", path, errno);
  if (state.st_nlink == 0) return file_error("lock", path, ENOENT);
  return lock;
}

std::optional<FolderLock> FolderLock::take(const std::string& folder) {
  FolderLock lock(::open(lock_path(folder).c_str(), O_RDWR | O_CLOEXEC));
  if (lock.descriptor_ < 0) {
    if (errno != ENOENT) return std::nullopt;
    return lock;
  }
  if (flock(lock.descriptor_, LOCK_EX | LOCK_NB) != 0) return std::nullopt;
  return lock;
}

FolderLock::FolderLock(FolderLock&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

namespace {

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
