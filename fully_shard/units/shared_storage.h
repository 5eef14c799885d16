// Parameters whose memory something else uses as well. fully_shard moves a parameter's
// values into shards, and whatever shared the memory would go on with the old ones.
// Being the same tensor under two names is a tie, and is kept. Tensors of one storage
// that have no element in common share nothing.
#pragma once

#include "fully_shard/units/managed_modules.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Throws ValueError for the first of `fresh`, the parameters to be sharded, that has
// elements in common with another parameter or buffer at or below `modules`, naming both;
// that belongs to a graph that is alive; or whose storage has a handle that is none of
// theirs: a view that the model keeps, or a parameter or buffer elsewhere, disjoint or
// not. Local; reads no values.
void validate_storages(const std::vector<torch::nn::Module*>& modules,
                       const std::vector<const FoundParam*>& fresh, int64_t rank);

}  // namespace fsdp::internal
