// A safetensors file that is read in parts, each byte of it checked against the checksum
// of its MiB before it is used. Whole MiBs go straight to where they belong; the edges of
// a run through a buffer of one MiB, so that small runs nearby read it once.
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

  // The entry that holds `box` of `tensor`, or an error.
  absl::StatusOr<const Entry*> find(const std::string& tensor, const Box& box) const;
  // `bytes` at `offset` of the data.
  absl::Status read(void* target, int64_t bytes, int64_t offset);
  // Every byte of the file against its checksums.
  absl::Status verify_all();

  const Header& header() const { return header_; }
  int64_t bytes_read() const { return bytes_read_; }

 private:
  VerifiedFile(InputFile file, Header header, std::string sums);
  absl::Status read_block(int64_t block);
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
