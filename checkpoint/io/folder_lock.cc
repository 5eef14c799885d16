#include "checkpoint/io/folder_lock.h"

#include "checkpoint/files/file_calls.h"
#include "checkpoint/io/own_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace fsdp::internal::checkpoint {
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

}  // namespace fsdp::internal::checkpoint
