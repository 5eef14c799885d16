// New tensors made from a DTensor: zeros_like, new_zeros and their like; and eye.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_factory(OpTable& table);

}  // namespace fsdp::internal
