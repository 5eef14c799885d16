// Operators that need the whole of the dimension that they work along: cumsum, sort,
// flip, roll, tril, logsumexp, median, kthvalue and their like.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_whole_dim(OpTable& table);

}  // namespace fsdp::internal
