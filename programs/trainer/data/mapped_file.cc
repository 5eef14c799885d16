#include "programs/trainer/data/mapped_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

namespace programs {

namespace {

size_t size_of(const std::string& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  TORCH_CHECK_VALUE(!error, path, ": ", error.message());
  return static_cast<size_t>(size);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : size_(size_of(path)) {
  if (size_ == 0) return;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK_VALUE(file >= 0, path, ": ", std::generic_category().message(errno));
  bytes_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
  const int error = errno;
  ::close(file);
  TORCH_CHECK_VALUE(bytes_ != MAP_FAILED, path, ": ", std::generic_category().message(error));
}

MappedFile::~MappedFile() {
  if (size_ > 0) ::munmap(bytes_, size_);
}

}  // namespace programs
