// How long a planned step would take, from what a machine is said to do. An estimate: the
// numbers are the caller's, and what overlaps is not known. No torch here.
#pragma once

#include "programs/planner/links.h"

#include <cstdint>

namespace programs {

// Of one rank.
struct MachineRates {
  double flops_per_second = 0;          // that products of matrices reach
  double node_bytes_per_second = 0;     // received from ranks of the node
  double network_bytes_per_second = 0;  // received from others
};

// Bytes that one rank receives in a step.
struct LinkBytes {
  double within_node = 0;
  double between_nodes = 0;

  void add(Link link, double bytes) {
    (link == Link::kWithinNode ? within_node : between_nodes) += bytes;
  }
};

struct StepEstimate {
  double compute_seconds = 0;
  double communication_seconds = 0;  // both links, one after the other
  // Where all communication is hidden behind computation, or none.
  double least_seconds() const;
  double most_seconds() const { return compute_seconds + communication_seconds; }
};

StepEstimate estimate_step(double flops, const LinkBytes& bytes, const MachineRates& rates);

}  // namespace programs
