// The tensors of a file that torch.save wrote, Python's or LibTorch's, or TorchScript, or
// of such a file inside another: where in the file the elements of each lie. Nothing is
// executed.
//
//   absl::StatusOr<ArchivedTensors> found = tensors_of_archive(file, 0, file.bytes());
#pragma once

#include "checkpoint/files/file_calls.h"
#include "checkpoint/files/file_checks.h"
#include "checkpoint/format/pickle/pickle.h"

#include <absl/status/statusor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct ArchivedTensor {
  std::string name = {};  // as in PickledTensor
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape = {};
  std::vector<int64_t> strides = {};  // in elements; empty: contiguous
  int64_t begin = 0;                  // of its first element, in the file
  bool conj = false, neg = false;     // its values are the conjugates, or the negatives
};

struct ArchivedTensors {
  std::vector<ArchivedTensor> tensors = {};
  std::vector<Unread> unread = {};  // what is no tensor or cannot be read
};

// The zip archive in bytes [offset, offset + length) of `file`: torch.save since 1.6,
// torch::save, torch::jit::pickle_save, ScriptModule.save. An error for another format.
absl::StatusOr<ArchivedTensors> tensors_of_archive(const InputFile& file, int64_t offset,
                                                   int64_t length);

// The object itself that the zip archive at `path` holds.
absl::StatusOr<Pickle> pickle_of_archive(const std::string& path);

// A file of torch.save before 1.6, pickles with the storages behind them.
absl::StatusOr<ArchivedTensors> tensors_of_legacy_file(const InputFile& file);

}  // namespace fsdp::internal::checkpoint
