#include "device_mesh/rendezvous/batch_threads.h"

#include <sched.h>

namespace fsdp::internal {
namespace {

bool set_own_policy(int policy) {
  const sched_param no_priority = {};
  return sched_setscheduler(/*pid=*/0, policy, &no_priority) == 0;
}

}  // namespace

StartsBatchThreads::StartsBatchThreads()
    : changed_(sched_getscheduler(/*pid=*/0) == SCHED_OTHER && set_own_policy(SCHED_BATCH)) {}

StartsBatchThreads::~StartsBatchThreads() {
  if (changed_) set_own_policy(SCHED_OTHER);
}

}  // namespace fsdp::internal
