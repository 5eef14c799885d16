// Views but reshaping ones: transpose, permute, slice, split, expand and their like,
// repeat, detach, view(dtype) and as_strided.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_view(OpTable& table);

}  // namespace fsdp::internal
