// How rows that are added up travel: through Gloo they are exchanged, small ones with the
// ranks' notices, and added here in the order of the ranks, the same bits on every run;
// through another backend by that one's reduce-scatter.
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/reduction.h"

#include <memory>

namespace fsdp::internal {

// Whether rows that are to be added ride with the notices: among ranks that share memory,
// and among two. Else all rows would be there at once, where an exchange adds one after
// the other.
bool rides(const IssueLog& log, const Group& group, int64_t row_bytes);

// The sum of the rows of `dtype` that rode with the notices (IssueLog::announce).
std::unique_ptr<PendingReduction> sum_of_riders(Announcement announcement, at::ScalarType dtype);

// Announces on `log`, which is that of `group`; does not block. Collective over `group`.
std::unique_ptr<PendingReduction> start_reduction(const std::shared_ptr<IssueLog>& log,
                                                  const Group& group,
                                                  const SumRowsOptions& options);

// One row, added up over the ranks with the same bits on all of them: each rank adds one
// piece of it and sends it to the others. Announces on `log`, which is that of `group`;
// does not block. Collective over `group`.
std::unique_ptr<PendingReduction> start_row_sum(const std::shared_ptr<IssueLog>& log,
                                                const Group& group, const SumRowOptions& options);

}  // namespace fsdp::internal
