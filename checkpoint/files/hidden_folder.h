// The hidden folders that a save makes beside a checkpoint, known by their names:
// ".step-1.saving-<id>", where <id> is the save's, 16 hexadecimal digits. Any other name,
// such as ".step-1.old-backup", is somebody else's.
#pragma once

#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

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

// Those in `directory`, by name: folders, no symbolic links. Local.
std::vector<HiddenFolder> hidden_folders_in(const std::string& directory);

}  // namespace fsdp::internal::checkpoint
