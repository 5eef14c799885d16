#include "examples/mapped_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

namespace examples {

MappedFile::MappedFile(const std::string& path)
    : size_(static_cast<size_t>(std::filesystem::file_size(path))) {
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

}  // namespace examples
