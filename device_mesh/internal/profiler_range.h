// A range that LibTorch's profilers see: "fsdp::all_gather(block0) 4096 bytes", or
// without the bytes. They are those that it brings from other ranks, as counters count.
// In the name, since inputs of ranges are recorded with those of operators only, and
// there profilers look into memory that sharded parameters do not have. Costs nothing
// where nobody looks. Local.
//
//   const ProfilerRange range("all_gather", unit_name, bytes);
#pragma once

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
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;

 private:
  std::unique_ptr<at::RecordFunction> range_;  // null where nobody looks
};

}  // namespace fsdp::internal
