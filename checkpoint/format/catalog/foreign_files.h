// What others wrote: files of safetensors, of torch.save and of TorchScript, alone, in
// folders, or named by an index as Hugging Face's folders have it; and folders of
// torch.distributed.checkpoint (dcp_folder.h).
#pragma once

#include "checkpoint/files/file_checks.h"
#include "checkpoint/format/catalog/catalog.h"

#include <absl/status/statusor.h>

#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// Reads every header of the files, or the metadata of a folder of
// torch.distributed.checkpoint. What of it cannot be read stands in `unread` and leaves
// the rest readable. kNotFound for a folder without weights, and for a file that holds
// none an error that says what it is.
absl::StatusOr<Catalog> catalog_of_files(const std::string& path);

// Which files of a folder hold a model's weights, by their names alone: those of Hugging
// Face's folders, with an index or without, safetensors before torch.save's, and the
// plain ones before variants such as model.fp16.safetensors.
//
//   WeightFiles found = weight_files({"model.safetensors", "model.fp16.safetensors"});
//   found.names;  // model.safetensors
struct WeightFiles {
  std::string index = {};               // the file that names the others; empty: there is none
  std::vector<std::string> names = {};  // without an index: the files, sorted
  std::vector<Unread> variants = {};    // left aside, each for a plain one
};

// Both empty where none of `names` holds weights. Prefers model.safetensors.index.json
// where there are several indices.
WeightFiles weight_files(const std::vector<std::string>& names);

}  // namespace fsdp::internal::checkpoint
