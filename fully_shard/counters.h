// What the runtime has done and holds: numbers for progress lines, benchmarks and tests.
//
//   const auto counters = fsdp::counters(mesh);
//   std::cout << counters.all_gathers    // issued by this rank since the start
//             << counters.peak_bytes;    // high-water mark of bytes beyond the shards
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"

#include <cstdint>

namespace fsdp {

struct Counters {
  // Events since the start, of all units that share the mesh's group.
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t all_reduces = 0;             // of hybrid sharding, over the replicas
  int64_t outer_all_gathers = 0;       // of HFSDP, over the outer dimension
  int64_t outer_reduce_scatters = 0;   // of HFSDP, over the outer dimension
  int64_t prefetched_all_gathers = 0;  // of all_gathers, those issued before they were needed
  int64_t unused_prefetches = 0;       // of those, the ones that were dropped unused
  int64_t late_reduce_scatters = 0;    // of reduce_scatters, second ones for late gradients
  int64_t reshards = 0;
  int64_t all_gather_bytes = 0;        // that all-gathers bring or read from other ranks, padded
  int64_t reduce_scatter_bytes = 0;    // that reduce-scatters bring from other ranks, padded
  int64_t all_reduce_bytes = 0;        // that all-reduces bring from other ranks, padded
  int64_t outer_all_gather_bytes = 0;  // the same of the outer dimension
  int64_t outer_reduce_scatter_bytes = 0;  // the same of the outer dimension
  double wait_seconds = 0;                 // the calling thread blocked on a collective

  // Bytes held now.
  int64_t sharded_bytes = 0;       // parameter shards, padded
  int64_t inner_shard_bytes = 0;   // HFSDP: inner shards, put together from those
  int64_t unsharded_bytes = 0;     // full parameters
  int64_t in_place_bytes = 0;      // full parameters that are read in the shards of all ranks
  int64_t post_forward_bytes = 0;  // parts of them that ReshardAfterForward::to_world(n) keeps
  int64_t staging_bytes = 0;   // gather buffers, reduce inputs in flight and their received rows
  int64_t gradient_bytes = 0;  // full gradients accumulating
  // High-water mark since reset_peak, of what takes memory beyond the shards: neither
  // sharded_bytes nor inner_shard_bytes nor in_place_bytes.
  int64_t peak_bytes = 0;
};

// Local. All zero when no unit lives on this mesh's group.
[[nodiscard]] FSDP_API Counters counters(const DeviceMesh& mesh);
// Sets peak_bytes to what is held now. Local.
FSDP_API void reset_peak(const DeviceMesh& mesh);

}  // namespace fsdp
