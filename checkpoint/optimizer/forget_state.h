// A parameter's optimizer state as before its first step.
#pragma once

#include <set>

namespace torch::optim {
class Optimizer;
}

namespace fsdp::internal::checkpoint {

// Erases the state of the parameters with these handles; Adagrad, which makes its state
// when it is made and needs it to step, gets a new one.
void forget_state(torch::optim::Optimizer& optimizer, const std::set<const void*>& handles);

}  // namespace fsdp::internal::checkpoint
