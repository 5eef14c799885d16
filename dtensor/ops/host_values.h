// Operators whose result is a value on the host and no tensor: item(), equal() and
// allclose(); and the operators behind &, | and ^, which are taken apart like allclose().
#pragma once

namespace fsdp::internal {

class OpTable;

void add_host_values(OpTable& table);

}  // namespace fsdp::internal
