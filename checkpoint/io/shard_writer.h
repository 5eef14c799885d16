// Writes one safetensors file and the checksums beside it, hashing bytes while they are
// written. Contiguous CPU tensors are written from where they lie; others through a copy
// of one tensor at a time.
#pragma once

#include "checkpoint/format/safetensors.h"

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

inline constexpr const char* kChecksumSuffix = ".xxh3";

struct WrittenFile {
  int64_t bytes = 0;
  std::string checksum;  // of the .xxh3 file
};

// Local. A file that was not finished is the caller's to remove.
class ShardWriter {
 public:
  // `entries` are laid out; values are written in their order. `sharded`: see
  // format_header().
  static absl::StatusOr<ShardWriter> create(const std::string& path, std::vector<Entry> entries,
                                            std::map<std::string, std::string> metadata,
                                            bool sharded);
  ShardWriter(ShardWriter&&) noexcept;
  ~ShardWriter();

  // Converts to the entry's dtype. REQUIRES: the next entry's box, by shape.
  absl::Status write(const at::Tensor& value);
  // Both files are synced; their folder is not.
  absl::StatusOr<WrittenFile> finish();

 private:
  class HashedFile;
  ShardWriter(std::string path, std::vector<Entry> entries, std::unique_ptr<HashedFile> file);

  std::string path_;
  std::vector<Entry> entries_;
  std::unique_ptr<HashedFile> file_;
  size_t next_ = 0;
};

}  // namespace fsdp::internal::checkpoint
