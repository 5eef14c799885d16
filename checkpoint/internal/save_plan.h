// Who writes what: from names, dtypes, shapes and placements alone, so that every rank
// comes to the same plan without being told.
#pragma once

#include "checkpoint/internal/manifest.h"
#include "checkpoint/internal/shard_writer.h"
#include "checkpoint/internal/state_items.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct SaveItem {
  std::string name;  // the folder
  std::string kind;
  std::vector<NamedTensor> tensors;
  std::map<std::string, std::string> ties;
  Json details = Json::object();
};

struct SavePlan {
  // Layouts and items; no files yet. The same on all ranks whose models have the same
  // parameters.
  Manifest manifest;
  std::map<std::string, std::vector<PartToWrite>> mine;  // what this rank writes, by item
};

// One rank among those that hold a box writes it. `balanced`: tensors by falling size go
// to the copy whose ranks have the least to write; else to the first copy, which then
// does not depend on other tensors. Throws ValueError for dtypes that the format lacks
// and for Partial placements. Local.
SavePlan plan_save(const std::vector<SaveItem>& items, int64_t rank, int64_t world_size,
                   bool balanced);

// Plans of ranks whose models differ (stages of a pipeline), as one. Throws ValueError
// where two ranks mean different things by one name.
Manifest merge_plans(const std::vector<Manifest>& plans);

}  // namespace fsdp::internal::checkpoint
