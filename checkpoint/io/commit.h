// How a checkpoint appears: written into a hidden folder beside its place, and moved
// there by one rename. At any moment a reader sees the previous checkpoint or the new
// one, whole. Rank 0 only; see the table in docs/checkpoint.md for what a crash leaves.
#pragma once

#include "checkpoint/io/save_folders.h"

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// "runs/step-1" as an absolute path without a trailing slash; "" as it is.
std::string normal_path(const std::string& path);
// The hidden folder in which save `id` of `path` is written.
std::string staging_path(const std::string& path, const std::string& id);

class Commit {
 public:
  // Puts back what an interrupted overwrite moved away, makes the hidden folder with
  // `folders` in it, and locks it. Refuses an existing `path` unless `overwrite`, and
  // with that what is no checkpoint or holds anything besides. Errors do not say `path`.
  static absl::StatusOr<Commit> begin(const std::string& path, const std::string& id,
                                      const std::vector<std::string>& folders, bool overwrite);
  Commit(Commit&&) noexcept;
  Commit& operator=(Commit&&) = delete;
  ~Commit();  // removes the hidden folder, which is its own, unless finished

  // Writes the manifest, syncs the folders, and renames. Afterwards the checkpoint
  // stands; what fails later is a warning.
  absl::Status finish(const std::string& manifest);
  // Removes what was replaced and what dead saves left here, then all but the last
  // `keep_last` checkpoints (0: keeps all): folders that are known as a save's by their
  // names and by what is in them, and hold nothing else. No symbolic links.
  void tidy(int64_t keep_last);

 private:
  Commit(std::string path, std::string id, std::vector<std::string> folders, bool overwrite)
      : path_(std::move(path)),
        id_(std::move(id)),
        folders_(std::move(folders)),
        overwrite_(overwrite) {}
  absl::Status prepare();
  absl::Status make_staging();
  absl::Status move_into_place();

  std::string path_;
  std::string id_;
  std::vector<std::string> folders_;
  bool overwrite_ = false;
  bool pending_ = false;
  std::optional<FolderLock> lock_;
};

struct Committed {
  std::string path;      // its place
  std::string folder;    // where it lies: there, or where an interrupted overwrite moved it
  bool is_link = false;  // a symbolic link to a checkpoint
  int64_t step = -1;
  int64_t saved_at = 0;
};
// The whole checkpoints in `directory`, oldest first, links to them before them. Local.
std::vector<Committed> committed_checkpoints(const std::string& directory);

// The folder to read for `path`: itself, or where an interrupted overwrite moved the
// previous one.
std::string readable_path(const std::string& path);

}  // namespace fsdp::internal::checkpoint
