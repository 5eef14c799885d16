// Folders for the files of a test.
#pragma once

#include "checkpoint/files/file_calls.h"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>

namespace fsdp::testing {

// A folder of its own, removed at the end.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(
      const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    static std::atomic<int> count = 0;
    path_ = parent / ("fsdp_test_" + std::to_string(getpid()) + "_" + std::to_string(count++));
    std::filesystem::create_directories(path_);
  }
  // Not remove_all(), which LibTorch exports broken.
  ~TemporaryFolder() { internal::checkpoint::remove_tree(path_).IgnoreError(); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

// In memory where the system has such a file system: for tests of many saves.
inline std::filesystem::path memory_folder() {
  const std::filesystem::path memory = "/dev/shm";
  return access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
}

}  // namespace fsdp::testing
