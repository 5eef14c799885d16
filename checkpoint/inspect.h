// What is in a checkpoint, for people.
#pragma once

#include "device_mesh/api.h"

#include <string>

namespace fsdp {

// Returns a table of tensors with dtype, shape, bytes and layout, and a list of what else
// is there, including what load() does not read, with the reason. `path` may be whatever
// load() reads. Reads the manifest or the headers only. Local. Throws as load().
[[nodiscard]] FSDP_API std::string describe_checkpoint(const std::string& path);

}  // namespace fsdp
