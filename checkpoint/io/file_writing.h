// The files that one rank writes in a save, part after part: all at once, or the first
// parts at once and the rest later, from copies, so that the tensors may change
// meanwhile.
//
//   FileWriting writing(folder, rank);
//   writing.take(files, value_of, staging, /*staged_bytes=*/0);
//   absl::StatusOr<WrittenFiles> written = writing.finish();
#pragma once

#include "checkpoint/io/shard_writer.h"
#include "checkpoint/io/staging_buffer.h"

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {

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

using WrittenFiles = std::map<std::string, WrittenFile>;  // by path

class FileWriting {
 public:
  // What is written of a part's tensor, on any device. May be collective: it is called
  // for every part of every file, in order, whatever fails.
  using ValueOf = std::function<at::Tensor(FileKind, const at::Tensor&)>;

  FileWriting(std::string folder, int64_t rank) : folder_(std::move(folder)), rank_(rank) {}

  // Writes this rank's parts, but copies the last `staged_bytes` of them. What cannot be
  // written is told by finish(). REQUIRES: files that are laid out; once.
  void take(std::vector<FileToWrite> files, const ValueOf& value_of, StagingBuffer& staging,
            int64_t staged_bytes);
  // Writes the copies and syncs the files. Local.
  absl::StatusOr<WrittenFiles> finish();

 private:
  struct Open {
    FileToWrite file;
    std::optional<ShardWriter> writer;
    std::vector<at::Tensor> copies;  // of the last parts
  };
  absl::Status open(Open& open);
  absl::Status write(Open& open, const at::Tensor& value);

  const std::string folder_;
  const int64_t rank_;
  std::vector<Open> mine_;
  absl::Status status_;
};

}  // namespace fsdp::internal::checkpoint
