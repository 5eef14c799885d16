// A file of tensors that is read in parts, each byte of it checked against the checksum
// of its MiB before it is used, where it has such. Whole MiBs go straight to where they
// belong and are checked there while the cache has them; the edges of a run through a
// buffer of one MiB, so that small runs nearby read it once. Several threads may read,
// each with a buffer of its own.
#pragma once

#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/format/safetensors.h"

#include <absl/status/statusor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

class VerifiedFile;

// What one reading thread keeps: the MiB that it read last. For files that stay where
// they are.
struct BlockBuffer {
  std::vector<char> bytes = {};
  const VerifiedFile* file = nullptr;  // null: holds nothing
  int64_t block = 0;
  int64_t bytes_read = 0;  // in all
};

class VerifiedFile {
 public:
  // Checks size and header, and the checksums' own one. Without `verify`, or where the
  // file has no checksums, only size and header.
  static absl::StatusOr<VerifiedFile> open(const StoredFile& stored, bool verify);

  // Where the elements of `box` of `tensor` lie in the data, or an error.
  absl::StatusOr<StoredElements> find(const std::string& tensor, const StoredBox& box,
                                      c10::ScalarType dtype) const;
  // `bytes` at `offset` of the data.
  absl::Status read(void* target, int64_t bytes, int64_t offset, BlockBuffer& buffer) const;
  // Every byte of the file against its checksums.
  absl::Status verify_all() const;

  const Header& header() const { return header_; }

 private:
  VerifiedFile(InputFile file, Header header, std::string sums);
  absl::StatusOr<StoredElements> find_in_header(const std::string& tensor, const Box& box,
                                                c10::ScalarType dtype) const;
  absl::StatusOr<StoredElements> find_in_archive(const std::string& tensor, const StoredBox& box,
                                                 c10::ScalarType dtype) const;
  // A whole MiB, or the last of the file, checked.
  absl::Status read_block(void* target, int64_t block) const;
  absl::Status fill(BlockBuffer& buffer, int64_t block) const;
  absl::Status check(const void* data, int64_t bytes, int64_t block) const;
  int64_t block_bytes(int64_t block) const;

  InputFile file_;
  Header header_;
  std::multimap<std::string, const Entry*> by_tensor_;
  std::string sums_;  // empty: nothing to check with
};

}  // namespace fsdp::internal::checkpoint
