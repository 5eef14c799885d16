// The transport over c10d process groups: any backend, any number of hosts.
//
// Gathers and reductions have a group each, so that they do not queue behind one another.
// On CPU a reduction is an exchange of rows (row_exchange.h): the same bits on every run,
// and every row's stamp can be checked. On other devices it is the backend's
// reduce-scatter.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/transport/transport.h"

namespace fsdp::internal {

// Collective over the ranks of `dim` the first time.
std::unique_ptr<Transport> make_c10d_transport(const DeviceMesh& mesh, int64_t dim);

}  // namespace fsdp::internal
