// Values that every rank must have alike, though each keeps its own part only: the
// parameters as they were when fully_shard met them, and what was written to members
// since the last gather. Each is known by a hash; all of a group's travel in one word
// with its next gather, and where the words differ one more exchange names the parameter.
//
// Any write to a member or a shard before the first gather takes that parameter's start
// value back.
// Everything but report() is local.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {
class DeviceMesh;
}

namespace fsdp::internal {

class AgreedValues {
 public:
  // Stands for the word of ranks that found theirs to differ.
  static constexpr uint64_t kDiffer = 1;

  explicit AgreedValues(size_t param_count) : params_(param_count) {}

  // The whole parameter with its name, and the dimension that is sharded; a parameter
  // without values (meta, no bytes) has none.
  void note_start(size_t param, const std::string& name, const at::Tensor& whole,
                  int64_t sharded_dim);
  void note_write(size_t param) { params_[param].start_values = 0; }
  // What a member's full copy holds after writes to it.
  void note_member_write(size_t param, const void* bytes, int64_t nbytes, c10::Device device);
  // The word for the next gather; 0 when there is nothing to compare.
  uint64_t word() const;
  // All ranks had the same word.
  void agreed();
  // Throws the same error on every rank of the mesh dimension. Collective over it.
  [[noreturn]] void report(const DeviceMesh& mesh, int64_t dim,
                           const std::vector<std::string>& names) const;

 private:
  struct Hashes {
    uint64_t start_geometry = 0;  // name, shape, dtype, sharded dimension
    uint64_t start_values = 0;
    uint64_t member_write = 0;
  };
  std::vector<Hashes> params_;
};

}  // namespace fsdp::internal
