// Where every unit of a model stands, as text for logs and debuggers.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"

#include <string>

namespace torch::nn {
class Module;
}

namespace fsdp {

// A line per unit at and below `module`, in the order of fsdp_modules(): name, what
// became of its full parameters (sharded, sharded post-forward with to_world(n),
// gathering, unsharded, or never sharded, as of one rank), bytes on this rank, its
// policy, the collective that it issued last, and, for one that was gathered more than
// eight times between two ends of a backward (in a loop over time), how often and what
// keeps it gathered. Then, per mesh dimension with collectives, those that this rank
// issued last (at most 64, of all models), oldest first, each with its number among those
// of its process group, which a dimension has several of:
//
//   l0: unsharded, 2 parameters, 352 bytes of shards, 704 unsharded; last: all-gather 17
//   collectives issued last by rank 0 among ranks 0, 1:
//     17: all-gather of unit 'l0', 352 bytes
//     9 of side group 1: reduce-scatter of unit 'l0', 352 bytes
//
// For people: the form may change. Local; reads no values. Not for another thread while
// the one that runs the model is in it: nothing here is locked. Of a rank that hangs, the
// error at the end of the timeout says the same.
[[nodiscard]] FSDP_API std::string describe_units(ModuleRef module);

}  // namespace fsdp
