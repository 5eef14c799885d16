// How one row is added up over the ranks, with the same bits on all of them: each rank
// adds one piece of it and sends it to the others.
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/reduction.h"

#include <memory>

namespace fsdp::internal {

// Announces on `log`, which is that of `group`; does not block. Collective over `group`.
std::unique_ptr<PendingReduction> start_row_sum(const std::shared_ptr<IssueLog>& log,
                                                const Group& group, const SumRowOptions& options);

}  // namespace fsdp::internal
