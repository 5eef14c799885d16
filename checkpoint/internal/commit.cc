#include "checkpoint/internal/commit.h"

#include "checkpoint/internal/file_calls.h"
#include "checkpoint/internal/manifest.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string hidden(const std::string& path, const std::string& what) {
  const fs::path place(path);
  return (place.parent_path() / ("." + place.filename().string() + "." + what)).string();
}

std::string lock_path(const std::string& folder) { return folder + "/lock"; }

std::vector<std::string> entries_of(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Hidden folders of `path` whose name goes on with `what`.
std::vector<std::string> leftovers(const std::string& path, const std::string& what) {
  const std::string prefix = "." + fs::path(path).filename().string() + "." + what;
  std::vector<std::string> found;
  const fs::path parent = fs::path(path).parent_path();
  for (const auto& name : entries_of(parent.string())) {
    if (name.rfind(prefix, 0) == 0) found.push_back((parent / name).string());
  }
  return found;
}

// Whether a living save is writing there.
bool is_locked(const std::string& folder) {
  const int lock = ::open(lock_path(folder).c_str(), O_RDWR | O_CLOEXEC);
  if (lock < 0) return false;
  const bool locked = flock(lock, LOCK_EX | LOCK_NB) != 0;
  ::close(lock);
  return locked;
}

void warn_unless_ok(const absl::Status& status, const std::string& path) {
  if (!status.ok()) {
    TORCH_WARN("checkpoint ", path, " is saved, but tidying failed: ", status.ToString());
  }
}

// Hidden first: a folder half removed must not look like a checkpoint.
absl::Status remove_checkpoint(const std::string& path) {
  const std::string doomed = hidden(path, "removing");
  if (auto moved = rename_path(path, doomed); !moved.ok()) return moved;
  return remove_tree(doomed);
}

// What lies where an interrupted overwrite moved it.
std::optional<std::string> moved_away(const std::string& path) {
  for (const auto& folder : leftovers(path, "old-")) {
    if (read_manifest(folder).ok()) return folder;
  }
  return std::nullopt;
}

}  // namespace

std::string normal_path(const std::string& path) {
  fs::path place = fs::absolute(path).lexically_normal();
  if (!place.has_filename()) place = place.parent_path();
  return place.string();
}

std::string staging_path(const std::string& path, const std::string& id) {
  return hidden(path, "saving-" + id);
}

absl::StatusOr<Commit> Commit::begin(const std::string& path, const std::string& id,
                                     const std::vector<std::string>& folders, bool overwrite) {
  Commit commit(path, id, folders, overwrite);
  if (auto prepared = commit.prepare(); !prepared.ok()) return prepared;
  return commit;
}

Commit::Commit(Commit&& other) noexcept
    : path_(std::move(other.path_)),
      id_(std::move(other.id_)),
      folders_(std::move(other.folders_)),
      overwrite_(other.overwrite_),
      pending_(std::exchange(other.pending_, false)),
      lock_(std::exchange(other.lock_, -1)) {}

Commit::~Commit() {
  if (pending_) remove_tree(staging_path(path_, id_)).IgnoreError();
  if (lock_ >= 0) ::close(lock_);
}

absl::Status Commit::prepare() {
  std::error_code error;
  fs::create_directories(fs::path(path_).parent_path(), error);
  if (error) return file_error("mkdir", fs::path(path_).parent_path(), error.value());
  if (!fs::exists(path_)) {
    if (const auto previous = moved_away(path_)) {
      if (auto back = rename_path(*previous, path_); !back.ok()) return back;
    }
  }
  if (!overwrite_ && fs::exists(path_)) {
    return absl::AlreadyExistsError(path_ + " exists; SaveOptions::overwrite replaces it");
  }
  const std::string folder = staging_path(path_, id_);
  if (auto made = make_directory(folder); !made.ok()) return made;
  pending_ = true;
  lock_ = ::open(lock_path(folder).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0 || flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    return file_error("lock", lock_path(folder), errno);
  }
  for (const auto& each : folders_) {
    fs::create_directories(folder + "/" + each, error);
    if (error) return file_error("mkdir", folder + "/" + each, error.value());
  }
  return absl::OkStatus();
}

absl::Status Commit::move_into_place() {
  const std::string folder = staging_path(path_, id_);
  if (!overwrite_ || !fs::exists(path_)) return rename_path(folder, path_);
  const absl::Status exchanged = exchange_paths(folder, path_);
  if (!absl::IsUnimplemented(exchanged)) return exchanged;
  const std::string old = hidden(path_, "old-" + id_);
  if (auto moved = rename_path(path_, old); !moved.ok()) return moved;
  auto moved = rename_path(folder, path_);
  if (!moved.ok()) rename_path(old, path_).IgnoreError();
  return moved;
}

absl::Status Commit::finish(const std::string& manifest) {
  const std::string folder = staging_path(path_, id_);
  absl::Status status = write_file(folder + "/" + kManifestName, manifest);
  for (size_t i = 0; i < folders_.size() && status.ok(); ++i) {
    status = sync_directory(folder + "/" + folders_[i]);
  }
  if (status.ok()) status = sync_directory(folder);
  if (status.ok()) status = move_into_place();
  if (!status.ok()) return status;
  pending_ = false;
  warn_unless_ok(sync_directory(fs::path(path_).parent_path()), path_);
  warn_unless_ok(remove_file(lock_path(path_)), path_);
  return absl::OkStatus();
}

void Commit::tidy(int64_t keep_last) {
  for (const char* what : {"saving-", "old-", "removing"}) {
    for (const auto& folder : leftovers(path_, what)) {
      if (!is_locked(folder)) warn_unless_ok(remove_tree(folder), path_);
    }
  }
  if (keep_last <= 0) return;
  auto all = committed_checkpoints(fs::path(path_).parent_path());
  for (size_t i = 0; i + static_cast<size_t>(keep_last) < all.size(); ++i) {
    if (all[i].path != path_) warn_unless_ok(remove_checkpoint(all[i].path), path_);
  }
}

std::vector<Committed> committed_checkpoints(const std::string& directory) {
  std::vector<Committed> found;
  for (const auto& name : entries_of(directory)) {
    std::string path = (fs::path(directory) / name).string();
    std::string place = path;
    if (name[0] == '.') {  // perhaps the previous one of an interrupted overwrite
      const size_t end = name.rfind(".old-");
      if (end == std::string::npos) continue;
      place = (fs::path(directory) / name.substr(1, end - 1)).string();
      if (fs::exists(place)) continue;
    }
    if (auto manifest = read_manifest(path); manifest.ok()) {
      found.push_back({place, manifest->step, manifest->saved_at});
    }
  }
  std::sort(found.begin(), found.end(), [](const Committed& a, const Committed& b) {
    return std::tie(a.step, a.saved_at, a.path) < std::tie(b.step, b.saved_at, b.path);
  });
  return found;
}

std::string readable_path(const std::string& path) {
  std::error_code error;
  if (fs::exists(path, error)) return path;
  const auto previous = moved_away(path);
  if (!previous) return path;
  TORCH_WARN("checkpoint ", path, ": a save that was to replace it was interrupted; reading ",
             *previous, ", which it had moved away");
  return *previous;
}

}  // namespace fsdp::internal::checkpoint
