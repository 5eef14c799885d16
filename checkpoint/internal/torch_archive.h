// The tensors of a file that Python's torch.save wrote, or of such a file inside another:
// where in the file the elements of each lie. Nothing is executed.
//
//   absl::StatusOr<std::vector<ArchivedTensor>> tensors = tensors_of_archive(file, 0, file.bytes());
#pragma once

#include "checkpoint/internal/file_calls.h"

#include <absl/status/statusor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct ArchivedTensor {
  std::string name;  // keys of the dictionaries around it, joined by "."; empty: the object itself
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // of its elements, in the file; they are contiguous
};

// The archive in bytes [offset, offset + length) of `file`. What is neither a tensor nor
// a dictionary is passed over. An error for another format, for tensors that are not
// contiguous or not dense, and for ones that do not lie in the file.
absl::StatusOr<std::vector<ArchivedTensor>> tensors_of_archive(const InputFile& file,
                                                               int64_t offset, int64_t length);

}  // namespace fsdp::internal::checkpoint
