// The step count of a learning-rate scheduler, all the state that LibTorch's have besides
// the learning rates, which lie in the optimizer's options.
#pragma once

namespace torch::optim {
class LRScheduler;
}

namespace fsdp::internal::checkpoint {

unsigned step_count(const torch::optim::LRScheduler& scheduler);
void set_step_count(torch::optim::LRScheduler& scheduler, unsigned count);

}  // namespace fsdp::internal::checkpoint
