// Writes through raw pointers bypass the gate, and are lost when their group is emptied.
// With DebugOptions::write_checks they are noticed there, by comparing this rank's part
// of the unsharded copy with its shard. Emptying happens where nothing may throw
// (destructors, an aborted backward), so the error waits here for the next place that
// may: a touch of any group of the root, reshard(), or the end of a backward.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::internal {

class RawWrites {
 public:
  // `parameter` was emptied and had changed without a mark. The first one is kept.
  void note(const std::string& parameter) {
    if (!parameter_) parameter_ = parameter;
  }
  // Throws once for what was noted. Local: a rank notices writes to its own part only.
  void raise(int64_t global_rank);

 private:
  std::optional<std::string> parameter_;
};

}  // namespace fsdp::internal
