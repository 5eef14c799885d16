#include "checkpoint/io/commit.h"

#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/manifest.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

namespace fs = std::filesystem;

using Hidden = HiddenFolder::Kind;

constexpr int kTries = 3;

std::string parent_of(const std::string& path) { return fs::path(path).parent_path().string(); }

std::vector<std::string> entries_of(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void warn_unless_ok(const absl::Status& status, const std::string& path) {
  if (!status.ok()) {
    TORCH_WARN("checkpoint ", path,
               " is saved, but tidying failed: ", std::string(status.message()));
  }
}

// Hidden first: a folder half removed must not look like a checkpoint.
absl::Status remove_checkpoint(const Committed& old, const std::string& id) {
  const OwnFiles own = files_of_checkpoint(old.folder);
  if (!own.are_all()) {
    return absl::FailedPreconditionError(old.folder + " stays: keep_last removes checkpoints and " +
                                         "nothing else, and it holds " + others_text(own));
  }
  const std::string doomed = hidden_path(old.path, Hidden::kRemoving, id);
  if (auto moved = rename_path(old.folder, doomed); !moved.ok()) return moved;
  return remove_own(doomed, own);
}

// What a dead save left, of `path` or another checkpoint beside it, if there is nothing
// else in it.
absl::Status remove_leftover(const HiddenFolder& left, const std::string& path) {
  const bool is_previous = left.kind == Hidden::kOld && !read_manifest(left.place).ok();
  const auto lock = FolderLock::take(left.path);
  if (is_previous || !lock) return absl::OkStatus();
  const OwnFiles own = files_of_leftover(left.path);
  // Without a mark it is empty, and another save may just have made it.
  const bool may_be_new = left.kind == Hidden::kSaving && own.marks.empty() && left.place != path;
  if (may_be_new || !own.are_all()) return absl::OkStatus();
  return remove_own(left.path, own);
}

// What lies where an interrupted overwrite moved it.
std::optional<std::string> moved_away(const std::string& path) {
  for (const auto& folder : hidden_folders_in(parent_of(path))) {
    const bool is_of_path = folder.kind == Hidden::kOld && folder.place == path;
    if (is_of_path && read_manifest(folder.path).ok()) return folder.path;
  }
  return std::nullopt;
}

// That `path` may be replaced: a checkpoint with nothing else in it, or an empty folder.
absl::Status check_replaceable(const std::string& path) {
  std::error_code error;
  const auto type = fs::symlink_status(path, error).type();
  const std::string rule = "SaveOptions::overwrite replaces checkpoints and nothing else, and ";
  const std::string advice = "; move it away, or choose another path";
  if (type == fs::file_type::symlink) {
    return absl::InvalidArgumentError(rule + "this is a symbolic link" + advice);
  }
  if (type != fs::file_type::directory) {
    return absl::InvalidArgumentError(rule + "this is a file" + advice);
  }
  const OwnFiles own = files_of_checkpoint(path);
  if (own.are_all()) return absl::OkStatus();
  return absl::InvalidArgumentError(rule + "here is " + others_text(own) +
                                    ", which is none of a checkpoint's files" + advice);
}

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error));
}

}  // namespace

std::string normal_path(const std::string& path) {
  if (path.empty()) return path;
  fs::path place = fs::absolute(path).lexically_normal();
  if (!place.has_filename()) place = place.parent_path();
  return place.string();
}

std::string staging_path(const std::string& path, const std::string& id) {
  return hidden_path(path, Hidden::kSaving, id);
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
      lock_(std::move(other.lock_)) {}

Commit::~Commit() {
  if (pending_) remove_tree(staging_path(path_, id_)).IgnoreError();
}

absl::Status Commit::prepare() {
  if (!fs::path(path_).has_filename()) {
    return absl::InvalidArgumentError("'" + path_ + "' is no path that a checkpoint can have");
  }
  std::error_code error;
  fs::create_directories(parent_of(path_), error);
  if (error) return file_error("mkdir", parent_of(path_), error.value());
  if (!is_there(path_)) {
    if (const auto previous = moved_away(path_)) {
      if (auto back = rename_path(*previous, path_); !back.ok()) return back;
    }
  }
  if (is_there(path_)) {
    if (!overwrite_) {
      return absl::AlreadyExistsError("it exists; SaveOptions::overwrite replaces a checkpoint");
    }
    if (auto checked = check_replaceable(path_); !checked.ok()) return checked;
  }
  return make_staging();
}

absl::Status Commit::make_staging() {
  const std::string folder = staging_path(path_, id_);
  absl::Status made;
  for (int i = 0; i < kTries && !lock_; ++i) {
    made = make_directory(folder);
    if (!made.ok()) return made;
    pending_ = true;
    auto lock = FolderLock::make(folder);
    made = lock.status();
    if (lock.ok()) lock_.emplace(*std::move(lock));
    if (!made.ok() && !absl::IsNotFound(made)) return made;
  }
  if (!made.ok()) return made;
  std::error_code error;
  for (const auto& each : folders_) {
    fs::create_directories(folder + "/" + each, error);
    if (error) return file_error("mkdir", folder + "/" + each, error.value());
  }
  return absl::OkStatus();
}

absl::Status Commit::move_into_place() {
  const std::string folder = staging_path(path_, id_);
  if (!overwrite_ || !is_there(path_)) return rename_path(folder, path_);
  if (auto checked = check_replaceable(path_); !checked.ok()) return checked;
  const absl::Status exchanged = exchange_paths(folder, path_);
  if (!absl::IsUnimplemented(exchanged)) return exchanged;
  const std::string old = hidden_path(path_, Hidden::kOld, id_);
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
  warn_unless_ok(sync_directory(parent_of(path_)), path_);
  warn_unless_ok(remove_file(path_ + "/" + kLockName), path_);
  return absl::OkStatus();
}

void Commit::tidy(int64_t keep_last) {
  for (const auto& left : hidden_folders_in(parent_of(path_))) {
    warn_unless_ok(remove_leftover(left, path_), path_);
  }
  if (keep_last <= 0) return;
  auto all = committed_checkpoints(parent_of(path_));
  std::erase_if(all, [](const Committed& each) { return each.is_link; });
  for (size_t i = 0; i + static_cast<size_t>(keep_last) < all.size(); ++i) {
    if (all[i].path != path_) warn_unless_ok(remove_checkpoint(all[i], id_), path_);
  }
}

std::vector<Committed> committed_checkpoints(const std::string& directory) {
  std::vector<Committed> found;
  const auto add = [&](const std::string& place, const std::string& folder) {
    const auto manifest = read_manifest(folder);
    if (!manifest.ok()) return;
    std::error_code error;
    const bool is_link = fs::is_symlink(folder, error);
    found.push_back({place, folder, is_link, manifest->step, manifest->saved_at});
  };
  for (const auto& name : entries_of(directory)) {
    const std::string path = (fs::path(directory) / name).string();
    if (name[0] != '.') add(path, path);
  }
  for (const auto& folder : hidden_folders_in(directory)) {
    // Perhaps the previous one of an interrupted overwrite.
    if (folder.kind == Hidden::kOld && !is_there(folder.place)) add(folder.place, folder.path);
  }
  std::sort(found.begin(), found.end(), [](const Committed& a, const Committed& b) {
    return std::tie(a.step, a.saved_at, b.is_link, a.path) <
           std::tie(b.step, b.saved_at, a.is_link, b.path);
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
