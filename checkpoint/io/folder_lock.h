// The lock of a folder in which a save writes, held while it lives: a file in it. Who
// finds it unheld knows that the save is dead.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <optional>
#include <string>

namespace fsdp::internal::checkpoint {

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

}  // namespace fsdp::internal::checkpoint
