// Who writes what: from names, dtypes, shapes and placements alone, so that every rank
// comes to the same plan without being told.
#pragma once

#include "checkpoint/checkpoint.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/io/file_writing.h"
#include "checkpoint/plan/state_items.h"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct SavePlan {
  // Layouts and items; no files yet. The same on all ranks whose models have the same
  // parameters.
  Manifest manifest;
  // This rank's; or, where values are gathered, all, the same on every rank. A part's
  // tensor is the whole one, as it is distributed.
  std::vector<FileToWrite> files;
  std::map<std::string, std::string> texts;  // files that rank 0 writes besides, by path
};

// Boxes as they lie. One rank among those that hold a box writes it. `balanced`: tensors
// by falling size go to the copy whose ranks have the least to write; else to the first
// copy, which then does not depend on other tensors. Throws ValueError for dtypes that
// the format lacks and for Partial placements. Local.
SavePlan plan_save(const std::vector<SaveItem>& items, int64_t rank, int64_t world_size,
                   bool balanced);

// Which whole tensor goes into which file, under the names that Hugging Face's readers
// look for: model.safetensors, or model-00001-of-00003.safetensors and so on with
// model.safetensors.index.json. Files of at most max_file_bytes, but of one tensor at
// least, written by the ranks in turn. Floating tensors of models become model_dtype.
// Throws as plan_save(). Local.
SavePlan plan_full(const std::vector<SaveItem>& items, int64_t world_size,
                   const SaveOptions& options);

// Tensors that are cut alike over several slices of the ranks, as over each "dp" of a
// mesh of dp x tp: names, by item. By the plans of all ranks, so the same on each. Local.
std::map<std::string, std::set<std::string>> names_on_slices(const std::vector<Manifest>& plans);
// Of those that this rank has, hashes of the values of its parts: {item: {name: hash}}.
// Waits for their device. Local.
Json hashes_on_slices(const std::vector<SaveItem>& items,
                      const std::map<std::string, std::set<std::string>>& names);

// Plans of ranks whose models differ (stages of a pipeline, slices), by rank and not
// balanced, as one: a plain tensor is written by the first rank that has it, and one that
// several slices have by the first slice, if by `hashes`, each rank's, the others have
// the same values. Throws ValueError where two ranks mean different things by one name,
// or where a rank does not have what it holds a part of.
Manifest merge_plans(const std::vector<Manifest>& plans, const std::vector<Json>& hashes = {});
// What `rank` writes of `items`, as `manifest` says.
std::vector<FileToWrite> files_of_rank(const std::vector<SaveItem>& items, const Manifest& manifest,
                                       int64_t rank);

}  // namespace fsdp::internal::checkpoint
