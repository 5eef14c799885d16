// Which whole tensor goes into which file, under the names that Hugging Face's readers
// look for: model.safetensors, or model-00001-of-00003.safetensors and so on with
// model.safetensors.index.json.
#pragma once

#include "checkpoint/checkpoint.h"
#include "checkpoint/plan/save_plan.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal::checkpoint {

// Files of at most max_file_bytes, but of one tensor at least, written by the ranks in
// turn. Floating tensors of models become model_dtype. Throws as plan_save(). Local.
SavePlan plan_full(const std::vector<SaveItem>& items, int64_t world_size,
                   const SaveOptions& options);

}  // namespace fsdp::internal::checkpoint
