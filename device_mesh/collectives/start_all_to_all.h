// How an all-to-all of split sizes is made. Ranks that share memory show each other all
// that they send, after a table of where what goes to each begins, and read their parts
// where they lie; else the backend's all-to-all.
#pragma once

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/pending_all_to_all.h"

#include <cstdint>
#include <memory>

namespace fsdp::internal {

// `call` tells those of other names apart. Throws ValueError for sizes that do not
// add up, before anything is sent.
std::unique_ptr<PendingAllToAll> start_all_to_all(const std::shared_ptr<IssueLog>& log,
                                                  const Group& group,
                                                  const AllToAllSplitOptions& options,
                                                  uint32_t call);

}  // namespace fsdp::internal
