// How the folders are known that saves make, so that a save removes those and nothing
// else: by their names beside a checkpoint, by a lock that their save holds while it
// lives, and by the files in them. Local, all of it.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// The hidden folders that a save makes beside a checkpoint, known by their names:
// ".step-1.saving-<id>", where <id> is the save's, 16 hexadecimal digits. Any other name,
// such as ".step-1.old-backup", is somebody else's.
struct HiddenFolder {
  enum class Kind {
    kSaving,    // is being written, or was replaced by what was
    kOld,       // moved away by an overwrite that cannot exchange two folders
    kRemoving,  // an older checkpoint that is being removed
  };
  std::string path;
  Kind kind = Kind::kSaving;
  std::string place;  // of the checkpoint: "runs/step-1"
};

std::string hidden_path(const std::string& place, HiddenFolder::Kind kind, const std::string& id);

// Those in `directory`, by name: folders, no symbolic links.
std::vector<HiddenFolder> hidden_folders_in(const std::string& directory);

inline constexpr const char* kLockName = "lock";

// The lock of a folder in which a save writes, held while it lives: a file in it. Who
// finds it unheld knows that the save is dead.
class FolderLock {
 public:
  // Makes the file. kNotFound where somebody removed the folder meanwhile.
  static absl::StatusOr<FolderLock> make(const std::string& folder);
  // Of a dead save, held so that nobody else removes what it left; of a folder without
  // the file, of nothing. Nullopt where a save holds it.
  static std::optional<FolderLock> take(const std::string& folder);

  FolderLock(FolderLock&&) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;
  ~FolderLock();

 private:
  explicit FolderLock(int descriptor) : descriptor_(descriptor) {}

  int descriptor_;  // -1: of nothing
};

// Which files of a folder are a checkpoint's: what a save may remove, and nothing else.
// Paths below the folder. Symbolic links are never a checkpoint's.
struct OwnFiles {
  std::vector<std::string> files;    // besides the marks
  std::vector<std::string> folders;  // below it, the deepest first
  std::vector<std::string> marks;    // what the folder is known by: its manifest, its lock
  std::vector<std::string> others;   // what is not a checkpoint's

  bool are_all() const { return others.empty(); }
};

// Of a checkpoint, whole or not: what its manifest lists. Without a manifest of save(),
// everything is other. Local.
OwnFiles files_of_checkpoint(const std::string& folder);

// Of what a save left that did not end: as above, or, where it did not come to write a
// manifest, known by its lock, what has names that a save gives. Local.
OwnFiles files_of_leftover(const std::string& folder);

// Removes `own` from `folder` and the folder itself, marks last, so that what an
// interrupted removal leaves is known again. What is not there is fine, and what came
// meanwhile stays.
absl::Status remove_own(const std::string& folder, const OwnFiles& own);

// "'notes.txt' and 2 more", for errors.
std::string others_text(const OwnFiles& own);

}  // namespace fsdp::internal::checkpoint
