// The files that one rank writes in a save, part after part: all at once, or the first
// parts at once and the rest later, from copies, so that the tensors may change
// meanwhile.
//
//   FileWriting writing(folder, rank);
//   writing.take(files, value_of, staging, /*staged_bytes=*/0);
//   absl::StatusOr<WrittenFiles> written = writing.finish();
#pragma once

#include "checkpoint/format/safetensors.h"

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// Host memory for the copies of a save in the background. Kept between saves, so that
// its pages are there and, beside an accelerator, pinned.
class StagingBuffer {
 public:
  // Room for `bytes` in all, beginning anew. REQUIRES: earlier copies are in use no more.
  void restart(int64_t bytes);
  // A contiguous copy as `dtype`, in the buffer while there is room.
  at::Tensor copy(const at::Tensor& value, c10::ScalarType dtype);

 private:
  at::Tensor memory_;
  int64_t used_ = 0;
};

// What a copy of `bytes` takes in the buffer, with its alignment.
int64_t staged_size(int64_t bytes);

struct PartToWrite {
  Entry entry;
  at::Tensor tensor;                // whose box it is
  const void* unit = nullptr;       // NamedTensor::unit
  std::vector<int64_t> begin = {};  // where the box begins in what is written of; empty: it is that
};

enum class FileKind {
  kBoxes,    // of distributed tensors, as the writing rank holds them
  kWhole,    // tensors that are gathered
  kPerRank,  // the writing rank's own tensors
};

struct FileToWrite {
  std::string path;  // below the checkpoint
  int64_t rank = 0;  // who writes it
  FileKind kind = FileKind::kBoxes;
  std::vector<PartToWrite> parts = {};
  std::map<std::string, std::string> metadata = {};
};
// Orders the parts as they lie in the file.
void lay_out(FileToWrite& file);

struct WrittenFile {
  int64_t bytes = 0;
  std::string checksum;  // of the .xxh3 file
};
using WrittenFiles = std::map<std::string, WrittenFile>;  // by path

class FileWriting {
 public:
  // What is written of a part's tensor, on any device. May be collective: it is called
  // for every part of every file, in order, whatever fails.
  using ValueOf = std::function<at::Tensor(FileKind, const at::Tensor&)>;

  FileWriting(std::string folder, int64_t rank);
  ~FileWriting();

  // Writes this rank's parts, but copies the last `staged_bytes` of them. What cannot be
  // written is told by finish(). REQUIRES: files that are laid out; once.
  void take(std::vector<FileToWrite> files, const ValueOf& value_of, StagingBuffer& staging,
            int64_t staged_bytes);
  // Writes the copies and syncs the files. Local.
  absl::StatusOr<WrittenFiles> finish();

 private:
  struct Open;
  absl::Status open(Open& open);
  absl::Status write(Open& open, const at::Tensor& value);

  const std::string folder_;
  const int64_t rank_;
  std::vector<Open> mine_;
  absl::Status status_;
};

}  // namespace fsdp::internal::checkpoint
