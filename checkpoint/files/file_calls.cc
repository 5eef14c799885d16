#include "checkpoint/files/file_calls.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr int kOpenFolders = 16;

FileCallHook& hook() {
  static FileCallHook installed;
  return installed;
}

int injected(std::string_view call, const std::string& path) {
  return hook() ? hook()(call, path) : 0;
}

absl::Status run(std::string_view call, const std::string& path,
                 const std::function<int()>& function) {
  if (const int error = injected(call, path)) return file_error(call, path, error);
  if (function() != 0) return file_error(call, path, errno);
  return absl::OkStatus();
}

}  // namespace

void set_file_call_hook(FileCallHook replacement) { hook() = std::move(replacement); }

absl::Status file_error(std::string_view call, const std::string& path, int error) {
  const std::string text = std::string(call) + " " + path + ": " + std::strerror(error);
  if (error == ENOENT) return absl::NotFoundError(text);
  if (error == EEXIST) return absl::AlreadyExistsError(text);
  if (error == EINVAL || error == ENOSYS) return absl::UnimplementedError(text);
  return absl::UnavailableError(text);
}

absl::StatusOr<OutputFile> OutputFile::create(const std::string& path) {
  if (const int error = injected("open", path)) return file_error("open", path, error);
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) return file_error("open", path, errno);
  return OutputFile(path, descriptor);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

absl::Status OutputFile::reserve(int64_t bytes) {
  if (bytes == 0 || fallocate(descriptor_, 0, 0, bytes) == 0) return absl::OkStatus();
  if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG) {
    return file_error("fallocate", path_, errno);
  }
  return absl::OkStatus();  // The file system has no such call: writing will tell.
}

absl::Status OutputFile::write(const void* data, int64_t bytes) {
  const auto* next = static_cast<const char*>(data);
  if (const int error = injected("write", path_)) return file_error("write", path_, error);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, static_cast<size_t>(bytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return file_error("write", path_, errno);
    next += written, bytes -= written;
  }
  return absl::OkStatus();
}

absl::Status OutputFile::sync_and_close() {
  absl::Status synced = run("fsync", path_, [&] { return ::fsync(descriptor_); });
  const absl::Status closed =
      run("close", path_, [&] { return ::close(std::exchange(descriptor_, -1)); });
  return synced.ok() ? closed : synced;
}

absl::StatusOr<InputFile> InputFile::open(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return file_error("open", path, errno);
  struct stat state {};
  if (fstat(descriptor, &state) != 0) {
    const int error = errno;
    ::close(descriptor);
    return file_error("stat", path, error);
  }
  return InputFile(path, descriptor, state.st_size);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      bytes_(other.bytes_) {}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

absl::Status InputFile::read_at(void* data, int64_t bytes, int64_t offset) const {
  auto* next = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::pread(descriptor_, next, static_cast<size_t>(bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return file_error("read", path_, errno);
    if (count == 0) {
      return absl::DataLossError("read " + path_ + ": it ends at byte " + std::to_string(offset) +
                                 ", " + std::to_string(bytes) + " bytes too early");
    }
    next += count, offset += count, bytes -= count;
  }
  return absl::OkStatus();
}

absl::Status write_file(const std::string& path, std::string_view text) {
  auto file = OutputFile::create(path);
  if (!file.ok()) return file.status();
  const absl::Status written = file->write(text.data(), static_cast<int64_t>(text.size()));
  return written.ok() ? file->sync_and_close() : written;
}

absl::StatusOr<std::string> read_file(const std::string& path) {
  auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  std::string text(static_cast<size_t>(file->bytes()), '\0');
  const absl::Status read = file->read_at(text.data(), file->bytes(), 0);
  if (!read.ok()) return read;
  return text;
}

absl::Status make_directory(const std::string& path) {
  return run("mkdir", path, [&] { return ::mkdir(path.c_str(), 0777); });
}

absl::Status sync_directory(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return file_error("open", path, errno);
  const absl::Status synced = run("fsync", path, [&] { return ::fsync(descriptor); });
  ::close(descriptor);
  return synced;
}

absl::Status rename_path(const std::string& from, const std::string& to) {
  return run("rename", to, [&] { return ::rename(from.c_str(), to.c_str()); });
}

absl::Status exchange_paths(const std::string& a, const std::string& b) {
  return run("exchange", b, [&] {
    return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE);
  });
}

absl::Status remove_file(const std::string& path) {
  return run("unlink", path, [&] { return ::unlink(path.c_str()); });
}

absl::Status remove_directory(const std::string& path) {
  return run("rmdir", path, [&] { return ::rmdir(path.c_str()); });
}

absl::Status remove_tree(const std::string& path) {
  // Not std::filesystem::remove_all: LibTorch exports a copy of its own, which calls
  // null.
  const auto remove_one = [](const char* name, const struct stat*, int, struct FTW*) {
    return ::remove(name);
  };
  return run("unlink", path, [&] {
    const int removed = ::nftw(path.c_str(), remove_one, kOpenFolders, FTW_DEPTH | FTW_PHYS);
    return removed != 0 && errno == ENOENT ? 0 : removed;
  });
}

}  // namespace fsdp::internal::checkpoint
