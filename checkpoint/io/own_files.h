// Which files of a folder are a checkpoint's: what a save may remove, and nothing else.
#pragma once

#include <absl/status/status.h>

#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

inline constexpr const char* kLockName = "lock";

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
