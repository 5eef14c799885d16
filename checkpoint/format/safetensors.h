// The header of a safetensors file: a length, JSON that names each tensor's dtype, shape
// and bytes, then the data. A file of a sharded tensor also says which box of which
// tensor each entry is, as torch.distributed.checkpoint does (DCP_SHARDING_INFO).
//
//   std::string head = format_header(entries, {});
//   absl::StatusOr<Header> header = read_header(file);
#pragma once

#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/box.h"

#include <absl/status/statusor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct Entry {
  std::string name;    // in the file
  std::string tensor;  // whose part it is; the same unless one file has several of its boxes
  c10::ScalarType dtype = c10::ScalarType::Float;
  Box box;                            // of the tensor
  std::vector<int64_t> global_shape;  // of the tensor
  bool knows_global_shape = true;     // else a lower bound, from this box alone
  int64_t begin = 0;                  // bytes from the start of the data; set by lay_out()
  int64_t end = 0;
  // Not empty: what it is that no tensor can hold, such as elements of 4 bits; dtype and
  // box are then of its bytes.
  std::string unread = {};
};
int64_t bytes_of(const Entry& entry);

struct Header {
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0;  // in the file
};

// Orders the entries by falling item size, else as they are, and gives each its bytes, so
// that all are naturally aligned. Returns the bytes of all.
int64_t lay_out(std::vector<Entry>& entries);

// The bytes before the data, padded so that the data starts at a multiple of 64.
// `sharded` adds DCP_SHARDING_INFO. REQUIRES: laid out.
std::string format_header(const std::vector<Entry>& entries,
                          std::map<std::string, std::string> metadata, bool sharded);

// Refuses what is not the format: no JSON, a repeated key, tensors that overlap, leave
// holes or do not end where the file ends. Entries of dtypes that no tensor has are
// `unread`.
absl::StatusOr<Header> read_header(const InputFile& file);

}  // namespace fsdp::internal::checkpoint
