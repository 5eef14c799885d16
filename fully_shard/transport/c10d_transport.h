// The transport over c10d process groups: any backend, any number of hosts; between ranks
// that share memory, with shards that they read by themselves (shared_shards.h).
//
// Gathers and reductions have a group each, so that they do not queue behind one another,
// and are announced there (device_mesh/collectives/issue_log.h), each kind in one order:
// when a reduction leaves between two gathers may differ from rank to rank, since
// gradients arrive differently. On CPU a reduction is an exchange of rows, added in the
// order of the ranks: the same bits on every run. On other devices it is the backend's
// reduce-scatter, and nothing is announced: ranks tell each other once per backward
// (host_exchange.h).
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/transport/transport.h"

#include <cstdint>
#include <memory>

namespace fsdp::internal {

// Collective over the ranks of `dim` the first time.
std::unique_ptr<Transport> make_c10d_transport(const DeviceMesh& mesh, int64_t dim);

}  // namespace fsdp::internal
