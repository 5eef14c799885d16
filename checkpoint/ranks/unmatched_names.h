// Names that the models of a job and a file do not share.
#pragma once

#include "checkpoint/ranks/world.h"

#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct UnmatchedNames {
  std::vector<std::string> missing;     // of a model, and not in the file
  std::vector<std::string> unexpected;  // in the file, and of no model
};

// Equal for equal names.
std::string fingerprint_of(const UnmatchedNames& names);

// Of ranks whose models differ, as the stages of a pipeline do: what some rank misses,
// and what no rank expects. Collective over `world`.
UnmatchedNames unmatched_by_all(const UnmatchedNames& mine, const World& world,
                                const std::string& what);

}  // namespace fsdp::internal::checkpoint
