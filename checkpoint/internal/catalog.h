// What there is to read: tensors by name, and for each the boxes that were saved and the
// file of each. Made from a checkpoint's manifest alone, or from what somebody else
// wrote.
#pragma once

#include "checkpoint/internal/box.h"
#include "checkpoint/internal/manifest.h"

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

struct StoredBox {
  size_t file = 0;
  Box box;
  // Without a header: where its elements lie in the file, or, with a length, an archive
  // of torch.save that holds it as its one tensor.
  int64_t begin = 0;
  int64_t archive_bytes = 0;
};

struct StoredTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  std::vector<StoredBox> boxes;
};

struct Catalog {
  std::vector<StoredFile> files;
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> ties;
};

// Item `item` of the checkpoint in `folder`. Opens nothing.
absl::StatusOr<Catalog> catalog_of_item(const std::string& folder, const Manifest& manifest,
                                        const std::string& item);
// A folder of safetensors files without a manifest, or one such file: reads every header.
// A folder of torch.distributed.checkpoint: reads its metadata. A file of torch.save.
absl::StatusOr<Catalog> catalog_of_files(const std::string& path);

}  // namespace fsdp::internal::checkpoint
