// Values that every rank must have alike, though each keeps its own part only: the
// parameters as they were when fully_shard met them, and, since the last gather, whole
// plain values that were copied into them, plain tensors without dimensions that they
// were written with, and what was written to members. Each is known by a hash; all of a
// group's travel in one word with its next gather, and where the words differ one more
// exchange tells which parameter it is.
//
// A write to a member or a shard invalidates the hash of that parameter's start values. A
// write of the whole parameter also invalidates the hashes of what was copied into it and
// of what it was written with. A hash of zero means "not recorded" and matches anything,
// because a rank without a part of the parameter need not write it, and ranks may write
// by other operators. Everything but difference() is local.
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

  // The whole parameter with its name, and how it is cut; a parameter without values
  // (meta, no bytes) has none.
  void note_start(size_t param, const std::string& name, const at::Tensor& whole, const Shard& cut);
  // A value that was copied before still has to be alike, because a part of it may be
  // left.
  void note_write(size_t param) { params_[param].start_values = 0; }
  void note_overwrite(size_t param) {
    Hashes& hashes = params_[param];
    hashes.start_values = hashes.copied = hashes.factors = 0;
  }
  // The whole value that was copied into the parameter, by its hash; after
  // note_overwrite().
  void note_copy(size_t param, uint64_t hash) { params_[param].copied = hash; }
  // Tensors without dimensions that the parameter is written with.
  void note_factors(size_t param, uint64_t hash);
  // What a member's full copy holds after writes to it.
  void note_member_write(size_t param, const void* bytes, int64_t nbytes, c10::Device device);
  // The word for the next gather; 0 when there is nothing to compare.
  uint64_t word() const;
  // Whether every rank of the mesh has something to compare, or none: not so with copies
  // and factors.
  bool is_of_all_ranks() const;
  // All ranks had the same word.
  void agreed();
  // What it says of all parameters, for ranks that look at it instead: table_size(params)
  // words.
  std::vector<uint64_t> table() const;
  static int64_t table_size(size_t param_count) {
    return static_cast<int64_t>(param_count * sizeof(Hashes) / sizeof(uint64_t));
  }
  // For ranks that read the others' tables, by rank: empty for this one, and for those
  // that say the same as this one or nothing. Which parameter differs, and how; what some
  // rank did not note differs from nothing. Empty: none.
  std::string difference_from(const std::vector<std::vector<uint64_t>>& tables,
                              const std::vector<std::string>& names) const;
  // For ranks of a mesh dimension whose words differ: which parameter does, and how; the
  // same on all of them. Empty where each noted the same or nothing, and this rank then
  // has what others noted. Collective over the dimension.
  std::string difference(const DeviceMesh& mesh, int64_t dim,
                         const std::vector<std::string>& names);

 private:
  struct Hashes {
    uint64_t start_geometry = 0;  // name, shape, dtype, sharded dimension
    uint64_t start_values = 0;    // 0: not noted, as copied
    uint64_t member_write = 0;
    uint64_t copied = 0;
    uint64_t factors = 0;
  };
  std::vector<Hashes> params_;
};

}  // namespace fsdp::internal
