// Which modules are units: attaches a Unit to a module from outside. Process-wide,
// thread-safe. Holds modules weakly and verifies them at every look-up, since a new
// module may reuse a dead one's address.
#pragma once

#include <memory>

namespace torch::nn {
class Module;
}

namespace fsdp::internal {

class Unit;

// Null unless `module` is a unit.
std::shared_ptr<Unit> find_unit(const torch::nn::Module& module);
// REQUIRES: owned by a shared_ptr and no unit yet.
void attach_unit(torch::nn::Module& module, std::shared_ptr<Unit> unit);

}  // namespace fsdp::internal
