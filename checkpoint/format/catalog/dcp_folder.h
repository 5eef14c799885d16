// What a folder holds that torch.distributed.checkpoint wrote: .metadata, a pickle that
// names every tensor's boxes, and *.distcp files in which each box is a small file of
// torch.save.
#pragma once

#include "checkpoint/format/catalog/catalog.h"

#include <absl/status/statusor.h>

#include <string>

namespace fsdp::internal::checkpoint {

bool is_dcp_folder(const std::string& path);

// Reads .metadata alone. Values that are no tensors, and tensors whose boxes were
// transformed on their way, such as compressed ones, are unread.
absl::StatusOr<Catalog> catalog_of_dcp_folder(const std::string& path);

}  // namespace fsdp::internal::checkpoint
