// Fills tensors from a catalog, each rank only what it holds: which boxes meet the
// target's, from which files, as byte runs. Everything that can be wrong is found by
// plan(), before anything is written.
//
//   TensorReader reader(catalog, {.verify = true});
//   for (auto& [name, tensor] : targets) status = reader.plan(name, tensor);
//   status = reader.read();
#pragma once

#include "checkpoint/internal/catalog.h"
#include "checkpoint/internal/verified_file.h"

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct ReadRules {
  bool verify = true;
  bool cast = false;
};

// Local; what it writes are registry entries' shards, other DTensors' local tensors and
// plain tensors.
class TensorReader {
 public:
  // `catalog` outlives the reader.
  TensorReader(const Catalog& catalog, ReadRules rules) : catalog_(catalog), rules_(rules) {}

  // That `target` is to receive the stored tensor `stored_name`. Refuses another shape, a
  // lossy dtype unless cast, and boxes that do not cover the target's exactly once. Opens
  // the files it needs. kInvalidArgument: the tensors do not fit; else: the files.
  absl::Status plan(const std::string& stored_name, const std::string& name, at::Tensor target);
  // Writes all that was planned; after an error some of it.
  absl::Status read();

  int64_t bytes_read() const;

 private:
  struct Piece {
    size_t file = 0;
    int64_t begin = 0;  // of the saved box, in the file's data
    Box saved, common;
  };
  struct Target {
    at::Tensor tensor;
    c10::ScalarType stored_dtype;
    Box box;
    std::vector<Piece> pieces;
  };
  absl::StatusOr<VerifiedFile*> open(size_t file);
  absl::Status add_pieces(const std::string& stored_name, const StoredTensor& stored,
                          Target& target);
  absl::Status read_target(const Target& target);
  absl::Status read_pieces(const Target& target, void* memory);

  const Catalog& catalog_;
  ReadRules rules_;
  std::vector<Target> targets_;
  std::map<size_t, VerifiedFile> open_;
};

}  // namespace fsdp::internal::checkpoint
