#include "programs/planner/step_estimate.h"

#include <algorithm>

namespace programs {

double StepEstimate::least_seconds() const {
  return std::max(compute_seconds, communication_seconds);
}

StepEstimate estimate_step(double flops, const LinkBytes& bytes, const MachineRates& rates) {
  return {.compute_seconds = flops / rates.flops_per_second,
          .communication_seconds = bytes.within_node / rates.node_bytes_per_second +
                                   bytes.between_nodes / rates.network_bytes_per_second};
}

}  // namespace programs
