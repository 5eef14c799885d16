// A gather over a c10d process group. Through Gloo small rows travel with their ranks'
// notices, larger ones are messages of their own, which meet only rows of the same
// gather; through another backend it is that one's all-gather.
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp::internal {

// `shards`: this rank's row, uint8 [bytes], sent by `custom` unless that is null.
// Announces `operation` on `log`, whose group may be another one; does not block.
// Collective over `group`.
std::unique_ptr<Gather> issue_c10d_gather(const std::shared_ptr<IssueLog>& log,
                                          const IssuedOperation& operation, const Group& group,
                                          const at::Tensor& shards, const Communicate* custom);

}  // namespace fsdp::internal
