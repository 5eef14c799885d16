// How many collectives of each kind a rank issues over one mesh.
#pragma once

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "tests/tensor_parallel/issued_collectives.h"

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

// Since the last call. Reduce-scatters are messages over Gloo: they are what else was
// announced.
class CountedCollectives {
 public:
  explicit CountedCollectives(DeviceMesh mesh) : mesh_(std::move(mesh)) { take(); }

  CollectiveCounts take() {
    auto issued = IssuedCollectives::take();
    const int64_t before = std::exchange(announced_, announced());
    CollectiveCounts counts{.all_reduces = issued["allreduce_"],
                            .all_gathers = issued["_allgather_base_"]};
    counts.reduce_scatters = announced_ - before - counts.all_reduces - counts.all_gathers;
    return counts;
  }

 private:
  int64_t announced() const {
    const auto operations = internal::collectives_of(mesh_, 0).log()->recent_operations();
    return operations.empty() ? 0 : operations.back().sequence;  // one rank announces nothing
  }

  DeviceMesh mesh_;
  IssuedCollectives issued_;
  int64_t announced_ = 0;
};

struct StepCounts {
  CollectiveCounts forward, backward;
};

}  // namespace fsdp::testing
