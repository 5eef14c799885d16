// A second transport for ranks that are threads: shards lie in memory that every rank
// reads, so a gather needs nobody else; reductions add the peers' rows where they are.
//
//   set_transport_factory(make_one_sided_transport);     // or FSDP_TEST_TRANSPORT=one_sided
//
// Reads and writes of shards come in epochs (docs/design/collectives.md, "Transports"): a
// rank's first write waits until every rank has come to its own first write, its first
// read after writes until every rank is done writing. A rank in a reduction, or one whose
// transport has gone, is done writing; a wait ends with an error after 20 s.
#pragma once

#include "fully_shard/transport/transport.h"

#include <cstdint>
#include <memory>

namespace fsdp::testing {

// Local; the ranks of the dimension must be threads of this process with one store.
std::unique_ptr<internal::Transport> make_one_sided_transport(const DeviceMesh& mesh, int64_t dim);

}  // namespace fsdp::testing
