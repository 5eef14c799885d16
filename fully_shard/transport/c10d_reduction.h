// A reduction over a c10d process group. Through Gloo the rows are exchanged, small ones
// with the ranks' notices, and added here in the order of the ranks: the same bits on
// every run. Through another backend it is that one's reduce-scatter.
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp::internal {

// Whether rows that are to be added ride with the notices: among two. Among more, all
// rows would be there at once, where an exchange adds one after the other, and a rank
// that has them all would not learn that another one lacks some.
bool rides(const IssueLog& log, const Group& group, int64_t row_bytes);

// The sum of the rows of `dtype` that rode with the notices (IssueLog::announce), which
// hold `staging_bytes`.
std::unique_ptr<PendingReduction> sum_of_riders(Announcement announcement, int64_t staging_bytes,
                                                at::ScalarType dtype);

// `rows`: uint8 [ranks, row bytes], elements of `dtype`; overwritten. Added up by
// `custom` unless that is null. Announces `operation` on `log`, whose group may be
// another one; does not block. Collective over `group`.
std::unique_ptr<PendingReduction> issue_c10d_reduction(const std::shared_ptr<IssueLog>& log,
                                                       const IssuedOperation& operation,
                                                       const Group& group, const at::Tensor& rows,
                                                       at::ScalarType dtype,
                                                       const Communicate* custom);

}  // namespace fsdp::internal
