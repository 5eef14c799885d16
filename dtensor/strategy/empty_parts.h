// Ways that fit only where every rank has something: some of LibTorch's kernels refuse a
// part without elements, or divide by its size. No torch here.
#pragma once

#include "dtensor/strategy/call_geometry.h"
#include "dtensor/strategy/way.h"

#include <vector>

namespace fsdp::internal {

// `ways` but for those that take no empty parts (Way::takes_empty_parts) and would leave
// one of an operand on some rank of the mesh dimensions that cut.
std::vector<Way> without_empty_parts(std::vector<Way> ways, const CallGeometry& call);

}  // namespace fsdp::internal
