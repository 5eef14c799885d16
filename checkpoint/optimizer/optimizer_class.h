// Whether saved state is of an optimizer's class: another's fields would make LibTorch
// fail in the middle, or step on from something else.
#pragma once

#include <set>
#include <string>

namespace torch::optim {
class Optimizer;
}

namespace fsdp::internal::checkpoint {

// "torch::optim::AdamW".
std::string class_of(const torch::optim::Optimizer& optimizer);

// Whether options with these names may be this optimizer's: all of its options, some of
// them, or more. Stock optimizers differ but Adam and AdamW.
bool has_options_like(const torch::optim::Optimizer& optimizer, const std::set<std::string>& names);

}  // namespace fsdp::internal::checkpoint
