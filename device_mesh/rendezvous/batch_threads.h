// Threads that do not interrupt others when they wake up.
//
// A thread of Gloo's transport that wakes up spins as long as another thread is inside a
// send or receive of the same connection (gloo/transport/tcp/pair.cc, handleEvents).
// Where it has taken that thread's core, it spins until the scheduler takes the core
// back, milliseconds later. As batch work it waits for an idle core or its turn instead.
#pragma once

namespace fsdp::internal {

// While one lives, the threads that this thread starts are scheduled as SCHED_BATCH.
class StartsBatchThreads {
 public:
  StartsBatchThreads();
  ~StartsBatchThreads();
  StartsBatchThreads(const StartsBatchThreads&) = delete;
  StartsBatchThreads& operator=(const StartsBatchThreads&) = delete;

 private:
  bool changed_;  // false: this thread has a policy of its own, which stays
};

}  // namespace fsdp::internal
