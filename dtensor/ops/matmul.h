// Products of matrices and vectors: mm, bmm, mv, dot, vdot, addmm, baddbmm.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_matmul(OpTable& table);

}  // namespace fsdp::internal
