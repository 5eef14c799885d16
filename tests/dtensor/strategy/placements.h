// Short names for the placements that strategies are made of.
#pragma once

#include "dtensor/placement.h"

namespace fsdp::internal {

inline const Placement kWhole = Replicate{};
inline const Placement kRows = Shard{0};
inline const Placement kColumns = Shard{1};
inline const Placement kTerms = Partial{};

}  // namespace fsdp::internal
