// Notices parameters that a managed module got after fully_shard (an adapter, a replaced
// sub-module): plain tensors whose gradients nobody reduces, so that the ranks' copies
// would drift apart without a word. Parameters outside every unit cannot be seen.
#pragma once

namespace fsdp::internal {

class FSDPParamGroup;

// Throws ValueError for the first trainable parameter that is registered in the modules
// of any unit below `group`'s root, those without parameters of their own included, and
// that neither a unit has nor an option ignores: whether or not it got a gradient here,
// so on all ranks alike. For the end of every backward, once per root: it walks the
// modules' registries and reads no values. Local.
void check_no_late_parameters(const FSDPParamGroup& group);

}  // namespace fsdp::internal
