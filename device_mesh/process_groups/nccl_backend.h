// How an NCCL backend is made and connected. The only place that includes what needs
// CUDA's headers.
#pragma once

#include "device_mesh/process_groups/backend_table.h"

namespace fsdp::internal {

// Null where this build has no NCCL.
MakeBackend nccl_factory();
ConnectBackend nccl_connector();

}  // namespace fsdp::internal
