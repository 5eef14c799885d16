// Which files of a folder hold a model's weights, by their names alone: those of Hugging
// Face's folders, with an index or without, safetensors before torch.save's, and the
// plain ones before variants such as model.fp16.safetensors. No torch here.
//
//   WeightFiles found = weight_files({"model.safetensors", "model.fp16.safetensors"});
//   found.names;  // model.safetensors
#pragma once

#include "checkpoint/format/unread.h"

#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct WeightFiles {
  std::string index = {};               // the file that names the others; empty: there is none
  std::vector<std::string> names = {};  // without an index: the files, sorted
  std::vector<Unread> variants = {};    // left aside, each for a plain one
};

// Both empty where none of `names` holds weights. Prefers model.safetensors.index.json
// where there are several indices.
WeightFiles weight_files(const std::vector<std::string>& names);

}  // namespace fsdp::internal::checkpoint
