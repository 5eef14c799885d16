// How the rows of a gather travel: through Gloo small ones with their ranks' notices,
// larger ones as messages of their own, which meet only rows of the same gather; through
// another backend by that one's all-gather.
#pragma once

#include "device_mesh/collectives/gather.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"

#include <memory>

namespace fsdp::internal {

// Announces on `log`, which is that of `group`; does not block. Collective over `group`.
std::unique_ptr<Gather> start_gather(const std::shared_ptr<IssueLog>& log, const Group& group,
                                     const GatherOptions& options);

}  // namespace fsdp::internal
