// The file-system calls that a save makes, each of which a test can make fail or use to
// end the process, and reading at an offset. Errors name the call, the path and errno's
// text.
#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace fsdp::internal::checkpoint {

// Called before each changing call ("mkdir", "open", "write", "fsync", "close", "rename",
// "exchange", "unlink", "rmdir") with its path; a result other than 0 is the errno that
// the call fails with. Of the whole process; null for none. For tests.
using FileCallHook = std::function<int(std::string_view call, const std::string& path)>;
void set_file_call_hook(FileCallHook hook);

absl::Status file_error(std::string_view call, const std::string& path, int error);

// A new file, written from the front.
class OutputFile {
 public:
  static absl::StatusOr<OutputFile> create(const std::string& path);
  OutputFile(OutputFile&&) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  // Claims the room, so that a full disk is known before anything is written.
  absl::Status reserve(int64_t bytes);
  absl::Status write(const void* data, int64_t bytes);
  absl::Status sync_and_close();

 private:
  OutputFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  std::string path_;
  int descriptor_;
};

class InputFile {
 public:
  static absl::StatusOr<InputFile> open(const std::string& path);
  InputFile(InputFile&&) noexcept;
  InputFile& operator=(InputFile&&) = delete;
  ~InputFile();

  int64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  // All `bytes` at `offset`, or an error.
  absl::Status read_at(void* data, int64_t bytes, int64_t offset) const;

 private:
  InputFile(std::string path, int descriptor, int64_t bytes)
      : path_(std::move(path)), descriptor_(descriptor), bytes_(bytes) {}

  std::string path_;
  int descriptor_;
  int64_t bytes_;
};

// Created, written, synced and closed.
absl::Status write_file(const std::string& path, std::string_view text);
absl::StatusOr<std::string> read_file(const std::string& path);

absl::Status make_directory(const std::string& path);  // it must not exist
absl::Status sync_directory(const std::string& path);
absl::Status rename_path(const std::string& from, const std::string& to);
// Both names at once; kUnimplemented where the file system cannot.
absl::Status exchange_paths(const std::string& a, const std::string& b);
absl::Status remove_file(const std::string& path);
absl::Status remove_directory(const std::string& path);  // an empty one
absl::Status remove_tree(const std::string& path);       // fine when it is not there

}  // namespace fsdp::internal::checkpoint
