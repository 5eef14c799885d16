// The files that others wrote: safetensors and torch.save, alone, in folders, or named by
// an index as Hugging Face's folders have it.
#pragma once

#include "checkpoint/format/catalog/catalog.h"

#include <absl/status/statusor.h>

#include <string>

namespace fsdp::internal::checkpoint {

// kNotFound for a folder without any. An error that says what the file is where it holds
// no weights.
absl::StatusOr<Catalog> catalog_of_foreign_files(const std::string& path);

}  // namespace fsdp::internal::checkpoint
