// What a step of Muon cost.
#pragma once

#include <cstdint>

namespace fsdp {

// Of one rank, in its last step.
struct MuonCounters {
  int64_t matrices = 0;        // that were orthogonalized here
  double work = 0;             // of those: the sum of s^2 (2 l + s), with sides s <= l
  int64_t exchanges = 0;       // with owners, both ways
  int64_t received_bytes = 0;  // from other ranks, by those exchanges
};

}  // namespace fsdp
