// What is in a checkpoint, for people.
#pragma once

#include "device_mesh/api.h"

#include <string>

namespace fsdp {

// A table of tensors with dtype, shape, bytes and layout, and what else there is, not
// least what load() does not read and why. `path`: whatever load() reads. Reads the
// manifest or the headers only. Local. Throws as load().
[[nodiscard]] FSDP_API std::string describe_checkpoint(const std::string& path);

}  // namespace fsdp
