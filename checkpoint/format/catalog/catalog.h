// What there is to read: tensors by name, and for each the boxes that were saved and the
// file of each. Made from a checkpoint's manifest alone (below), or from what somebody
// else wrote (foreign_files.h).
#pragma once

#include "checkpoint/files/file_checks.h"
#include "checkpoint/format/box.h"
#include "checkpoint/format/manifest.h"

#include <absl/status/statusor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct StoredFile {
  std::string path;
  int64_t bytes = -1;      // expected; -1: not known
  std::string checksum;    // of the .xxh3 file; empty: there is none to verify with
  bool has_header = true;  // of safetensors; else boxes say where they lie
};

// Where the elements of a box lie in the data of its file, and what they are before the
// bits that PyTorch resolves late.
struct StoredElements {
  int64_t begin = 0;                  // of the first, in bytes
  std::vector<int64_t> strides = {};  // in elements; empty: contiguous
  bool conj = false, neg = false;     // the values are the conjugates, or the negatives

  bool are_plain() const { return strides.empty() && !conj && !neg; }
};

struct StoredBox {
  size_t file = 0;
  Box box = {};
  // Without a header: where its elements are, or, with a length, where an archive of
  // torch.save begins that holds it as its one tensor.
  StoredElements elements = {};
  int64_t archive_bytes = 0;
};

struct StoredTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape = {};
  std::vector<StoredBox> boxes = {};
  std::string codec = {};  // as TensorRecord has it; empty where it is not known
};

struct Catalog {
  std::vector<StoredFile> files;
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> ties;
  std::map<std::string, Unread> unread;  // by name: what else there is, and why it is left

  // A tensor that will not be read after all, if it was added.
  void leave_out(const std::string& name, const std::string& what);
};

// Item `item` of the checkpoint in `folder`. Opens nothing.
absl::StatusOr<Catalog> catalog_of_item(const std::string& folder, const Manifest& manifest,
                                        const std::string& item);

}  // namespace fsdp::internal::checkpoint
