// Collectives whose data rides with their announcement, of any size, since the ranks
// share memory (IssueLog::carries_any): each rank reads what the others show, and nothing
// is sent besides. Sums are added in the order of the ranks, 16-bit types in float.
//
// Arguments as Collectives has them, checked already. Collective over the group of `log`.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"

namespace fsdp::internal {

// An all-gather, where each rank shows one row to all, or an all-to-all, where it shows
// `rows` of them, row r to rank r.
void riding_rows(IssueLog& log, const IssuedOperation& operation, const at::Tensor& input,
                 int64_t rows, const at::Tensor& output);
void riding_reduce_scatter(IssueLog& log, const IssuedOperation& operation, int64_t group_size,
                           const ReduceScatterOptions& options);
void riding_broadcast(IssueLog& log, const IssuedOperation& operation, int64_t rank,
                      const BroadcastOptions& options);

}  // namespace fsdp::internal
