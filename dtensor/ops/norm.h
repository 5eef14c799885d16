// norm and linalg_vector_norm.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_norm(OpTable& table);

}  // namespace fsdp::internal
