// Fills tensors from a catalog, each rank only what it holds: which boxes meet the
// target's, from which files, as byte runs, which two threads read. Everything that can
// be wrong is found by plan(), before anything is written.
//
//   TensorReader reader(catalog, {.verify = true});
//   for (auto& [name, tensor] : targets) status = reader.plan(name, tensor);
//   status = reader.read();
#pragma once

#include "checkpoint/format/box.h"
#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/io/verified_file.h"
#include "dtensor/layout/shard_layout.h"

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {

struct ReadRules {
  bool verify = true;
  bool cast = false;
  // LoadOptions::init_new_rows.
  std::function<void(const std::string& name, int64_t first, at::Tensor rows)> init_new_rows = {};
};

// Rows of a tensor that the file lacks.
struct NewRows {
  int64_t first = 0;  // of the tensor
  Box place;          // in what this rank holds
};

// Local; what it writes are registry entries' shards, other DTensors' local tensors and
// plain tensors.
class TensorReader {
 public:
  // `catalog` outlives the reader.
  TensorReader(const Catalog& catalog, ReadRules rules)
      : catalog_(catalog), rules_(std::move(rules)) {}

  // That `target` is to receive the stored tensor `stored_name`. Refuses another shape, a
  // lossy dtype unless cast, and boxes that do not cover the target's exactly once. Opens
  // the files it needs. kInvalidArgument: the tensors do not fit; else: the files.
  absl::Status plan(const std::string& stored_name, const std::string& name,
                    const at::Tensor& target);
  // The same of a new tensor, in this process's memory, of the stored shape and dtype. It
  // is allocated when the files are known to have every element: not for what a file
  // claims. kResourceExhausted: there is no such memory.
  absl::StatusOr<at::Tensor> plan_whole(const std::string& stored_name);
  // Writes all that was planned; after an error some of it.
  absl::Status read();

  int64_t bytes_read() const { return buffer_.bytes_read + other_buffer_.bytes_read; }

 private:
  struct Piece {
    size_t file = 0;
    StoredElements elements;  // of the saved box
    Box saved, common;        // where they lie beside the target's part; only `common` lies in it
  };
  struct Target {
    at::Tensor tensor;
    c10::ScalarType stored_dtype;
    Box part;  // the whole of what this rank holds
    std::vector<Piece> pieces;
    bool is_plain = true;   // the files have the very bytes, in order
    at::Tensor local = {};  // of `tensor`, once it is open
    std::string name = {};  // in messages
    std::vector<NewRows> new_rows = {};
  };
  absl::StatusOr<VerifiedFile*> open(size_t file);
  // Of what fills `box`, one of those that the target's part is made of.
  absl::Status add_pieces(const std::string& stored_name, const StoredTensor& stored,
                          const LocalBox& box, Target& target);
  // All that fills `boxes`, in the order in which the files have it.
  absl::Status find_pieces(const std::string& stored_name, const StoredTensor& stored,
                           const std::vector<LocalBox>& boxes, Target& target);
  absl::Status check_no_overlap(const std::string& stored_name, const Target& target) const;
  // Also sorts the targets by where the files have them.
  void open_all();
  // Where the bytes of a target go, as the file has them.
  struct Destination {
    const Target* target = nullptr;
    char* memory = nullptr;
    int64_t bytes = 0;
  };
  static Destination destination(const Target& target, const at::Tensor& memory);
  static bool takes_bytes_directly(const Target& target, const at::Tensor& local);
  absl::Status read_all(const std::vector<Destination>& destinations);
  // Bytes [from, to) of all destinations together.
  absl::Status read_range(const std::vector<Destination>& destinations, int64_t from, int64_t to,
                          BlockBuffer& buffer) const;
  absl::Status read_part(const Destination& destination, int64_t from, int64_t to,
                         BlockBuffer& buffer) const;
  absl::Status read_converted(const Target& target, const at::Tensor& local);
  absl::Status read_by_strides(const Target& target, const at::Tensor& local);
  void init_new_rows(const Target& target) const;

  const Catalog& catalog_;
  ReadRules rules_;
  std::vector<Target> targets_;
  std::map<size_t, VerifiedFile> open_;
  BlockBuffer buffer_, other_buffer_;  // kept, for the small runs of many tensors
};

}  // namespace fsdp::internal::checkpoint
