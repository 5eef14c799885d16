// The ready-made custom collectives of a unit, which count how often they are called.
//
//   CustomCalls calls;
//   calls.count_gathers(unit, mesh);
//   ...
//   calls.gathers();               // so far
#pragma once

#include "fully_shard/fully_shard.h"

#include <cstdint>
#include <memory>

namespace fsdp::testing {

class CustomCalls {
 public:
  // The unit's own from now on. Collective.
  void count_gathers(FSDPModule& unit, const DeviceMesh& mesh);
  void count_reductions(FSDPModule& unit, const DeviceMesh& mesh);

  // Null: the unit has the mesh's.
  const int64_t* gathers() const { return gathers_.get(); }
  const int64_t* reductions() const { return reductions_.get(); }

 private:
  std::shared_ptr<int64_t> gathers_, reductions_;  // shared with the functions
};

}  // namespace fsdp::testing
