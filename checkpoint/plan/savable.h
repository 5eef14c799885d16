// What a checkpoint can hold, checked before anything is written.
#pragma once

#include "checkpoint/format/strict_json.h"
#include "checkpoint/plan/save_plan.h"

#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// Throws ValueError for a name that is not UTF-8, as JSON must be, and for
// "__metadata__", which safetensors files keep for themselves.
void check_name(const std::string& name);

// Throws ValueError for a tensor that is undefined, not strided, or on the meta device,
// by its name.
void check_has_values(const NamedTensor& named);

// Both, of all tensors and their other names.
void check_savable(const std::vector<SaveItem>& items);

// The text of `json`, of a value called `name`. Throws ValueError for strings that are
// not UTF-8.
std::string text_of(const Json& json, const std::string& name);

}  // namespace fsdp::internal::checkpoint
