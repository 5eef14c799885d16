// A range that LibTorch's profilers see: "fsdp::all_gather(block0) 4096 bytes", or
// without the bytes. They are in the name, since inputs of ranges are recorded with those
// of operators only, and there profilers look into memory that sharded parameters do not
// have. Costs nothing where nobody looks. Local.
//
//   const ProfilerRange range("all_gather", unit_name, bytes);
//   const ProfilerRange range("redistribute", [&] { return text(); }, bytes);
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>

namespace at {
struct RecordFunction;
}

namespace fsdp::internal {

class ProfilerRange {
 public:
  ProfilerRange(const char* what, const std::string& of);
  ProfilerRange(const char* what, const std::string& of, int64_t bytes);
  // `of` is called where somebody looks.
  template <std::invocable Of>
  ProfilerRange(const char* what, const Of& of, int64_t bytes) : ProfilerRange() {
    if (range_) begin(what, of(), bytes);
  }
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;

 private:
  ProfilerRange();  // begins nothing yet
  void begin(const char* what, const std::string& of, int64_t bytes);

  std::unique_ptr<at::RecordFunction> range_;  // null where nobody looks
};

}  // namespace fsdp::internal
