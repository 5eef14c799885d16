// A file of tensors that is read in parts, each byte of it checked against the checksum
// of its MiB before it is used, where it has such. Whole MiBs go straight to where they
// belong; the edges of a run through a buffer of one MiB, so that small runs nearby read
// it once.
#pragma once

#include "checkpoint/internal/catalog.h"
#include "checkpoint/internal/safetensors.h"

#include <absl/status/statusor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

class VerifiedFile {
 public:
  // Checks size and header, and the checksums' own one. Without `verify`, or where the
  // file has no checksums, only size and header.
  static absl::StatusOr<VerifiedFile> open(const StoredFile& stored, bool verify);

  // Where the elements of `box` of `tensor` begin in the data, or an error.
  absl::StatusOr<int64_t> find(const std::string& tensor, const StoredBox& box,
                               c10::ScalarType dtype) const;
  // `bytes` at `offset` of the data.
  absl::Status read(void* target, int64_t bytes, int64_t offset);
  // Every byte of the file against its checksums.
  absl::Status verify_all();

  const Header& header() const { return header_; }
  int64_t bytes_read() const { return bytes_read_; }

 private:
  VerifiedFile(InputFile file, Header header, std::string sums);
  absl::StatusOr<int64_t> find_in_header(const std::string& tensor, const Box& box,
                                         c10::ScalarType dtype) const;
  absl::StatusOr<int64_t> find_in_archive(const std::string& tensor, const StoredBox& box,
                                          c10::ScalarType dtype) const;
  absl::Status read_block(int64_t block);
  // Straight to `target`, checked while the next ones are read.
  absl::Status read_blocks(char* target, int64_t first, int64_t count);
  absl::Status check_blocks(const char* data, int64_t first, int64_t count) const;
  // How many MiBs of the file [offset, offset + bytes) begins with.
  int64_t whole_blocks(int64_t offset, int64_t bytes) const;
  absl::Status check(const void* data, int64_t bytes, int64_t block) const;
  int64_t block_bytes(int64_t block) const;

  InputFile file_;
  Header header_;
  std::multimap<std::string, const Entry*> by_tensor_;
  std::string sums_;  // empty: nothing to check with
  std::vector<char> buffer_;
  int64_t buffered_ = -1;  // which MiB
  int64_t bytes_read_ = 0;
};

}  // namespace fsdp::internal::checkpoint
