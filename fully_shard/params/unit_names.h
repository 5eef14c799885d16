// Names of units and parameters: paths from the unit's own module until an ancestor is
// sharded, then from that, in the end from the root. A unit of several modules has no
// module that they could start from; its i-th one's names begin with "[i]" until then.
#pragma once

#include "fully_shard/units/managed_modules.h"

namespace fsdp::internal {

// `found` and all units below it are named from the module that `found` was found in.
void name_from_above(const FoundUnit& found);

}  // namespace fsdp::internal
