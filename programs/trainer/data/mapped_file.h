// A file's bytes, as long as it lives: mapped into memory, so that what is not looked at
// is not read.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace programs {

class MappedFile {
 public:
  // Throws ValueError, naming the file, where it cannot be read.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;

  int64_t size() const { return static_cast<int64_t>(size_); }
  const char* data() const { return static_cast<const char*>(bytes_); }

 private:
  size_t size_;
  void* bytes_ = nullptr;
};

// At any place, aligned or not.
template <class Number>
Number number_at(const char* bytes) {
  Number number;
  std::memcpy(&number, bytes, sizeof(number));
  return number;
}

}  // namespace programs
