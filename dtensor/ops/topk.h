// max and min along a dimension, argmax, argmin and topk.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_topk(OpTable& table);

}  // namespace fsdp::internal
