// Sums of one row over the ranks of a c10d group, the same bits on all of them.
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp::internal {

// Transport::all_reduce.
std::unique_ptr<PendingReduction> issue_c10d_all_reduce(const std::shared_ptr<IssueLog>& log,
                                                        const IssuedOperation& operation,
                                                        const Group& group, const at::Tensor& row);

}  // namespace fsdp::internal
