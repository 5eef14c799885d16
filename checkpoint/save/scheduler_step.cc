#include "checkpoint/save/scheduler_step.h"

#include <torch/optim/schedulers/lr_scheduler.h>

namespace fsdp::internal::checkpoint {
namespace {

using torch::optim::LRScheduler;

// A derived class may form a pointer to the protected member.
struct Access : LRScheduler {
  static unsigned LRScheduler::*member() { return &Access::step_count_; }
};

}  // namespace

unsigned step_count(const LRScheduler& scheduler) { return scheduler.*Access::member(); }
void set_step_count(LRScheduler& scheduler, unsigned count) { scheduler.*Access::member() = count; }

}  // namespace fsdp::internal::checkpoint
