// How many collectives of each kind a rank issues over one mesh.
#pragma once

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"

#include <cstdint>
#include <ostream>
#include <utility>

namespace fsdp::testing {

struct CollectiveCounts {
  int64_t all_reduces = 0, all_gathers = 0, reduce_scatters = 0;
  bool operator==(const CollectiveCounts&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, const CollectiveCounts& counts) {
  return out << counts.all_reduces << " all-reduces, " << counts.all_gathers << " all-gathers, "
             << counts.reduce_scatters << " reduce-scatters";
}

// Since the last call, over the first dimension of a mesh; what is neither an all-reduce
// nor an all-gather counts as a reduce-scatter. One rank announces nothing.
class CountedCollectives {
 public:
  explicit CountedCollectives(DeviceMesh mesh) : mesh_(std::move(mesh)) { take(); }

  CollectiveCounts take() {
    CollectiveCounts counts;
    const auto operations = internal::collectives_of(mesh_, 0).log()->recent_operations();
    for (const auto& operation : operations) {
      if (operation.lane != 0 || operation.sequence <= last_) continue;
      ++(operation.kind == internal::CollectiveKind::kAllReduce   ? counts.all_reduces
         : operation.kind == internal::CollectiveKind::kAllGather ? counts.all_gathers
                                                                  : counts.reduce_scatters);
      last_ = operation.sequence;
    }
    return counts;
  }

 private:
  DeviceMesh mesh_;
  uint32_t last_ = 0;
};

struct StepCounts {
  CollectiveCounts forward, backward;
};

}  // namespace fsdp::testing
