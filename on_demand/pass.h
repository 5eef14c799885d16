// Which pass the calling thread is in: training forward, inference, forward of a
// checkpointed region, recomputation of that region, or backward. It follows from grad
// mode, from the graph task that autograd is running, and from CheckpointedForward.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace fsdp::internal {

enum class Pass {
  kTraining,      // forward, gradients recorded
  kInference,     // forward, no gradients
  kCheckpointed,  // forward, no gradients until a backward runs it again
  kRecompute,     // gradients recorded inside a backward (activation checkpointing)
  kBackward,
};

Pass current_pass();
// The id of the running backward's graph task, or -1.
int current_graph_task();
// Whether the running backward accumulates into all leaves of its graph: it is neither
// autograd::grad nor was given inputs.
bool accumulates_everywhere();
// Whether the running backward was given an input to accumulate into that its graph does
// not know, as a registry entry.
bool has_unknown_input();

// While it lives, forwards of this thread that record nothing are kCheckpointed.
class CheckpointedForward {
 public:
  CheckpointedForward();
  ~CheckpointedForward();
  CheckpointedForward(const CheckpointedForward&) = delete;

 private:
  bool before_;
};

inline bool in_backward(Pass pass) { return pass == Pass::kBackward || pass == Pass::kRecompute; }
// A backward brings gradients of what this pass uses.
inline bool needs_reduction(Pass pass) {
  return pass == Pass::kTraining || pass == Pass::kCheckpointed || pass == Pass::kRecompute;
}
inline bool records_gradients(Pass pass) {
  return pass == Pass::kTraining || pass == Pass::kRecompute;
}

// Whether a backward of this rank is open, for threads that are not in it.
//
// On the CPU a backward that throws has been cleaned up when backward() throws. On a
// device autograd's own thread does that, in its own time: the caller may be at the next
// step already. Another thread outside any backward that finds one open therefore knows
// that it failed, and waits until it is cleaned up. The wait has a limit, in case another
// thread really runs one at the same time, which is a mistake of the caller's.
//
// begin() and end() by one thread at a time; the others by any.
class OpenBackward {
 public:
  explicit OpenBackward(int64_t global_rank) : global_rank_(global_rank) {}

  void begin() {
    run_here();
    is_open_.store(true, std::memory_order_release);
  }
  // The calling thread goes on with it: it will clean up.
  void run_here() noexcept { thread_.store(std::this_thread::get_id(), std::memory_order_relaxed); }
  void end() noexcept;
  // Open, and the calling thread is in no backward and does not run this one.
  bool has_failed() const;
  // Throws after `limit`.
  void await_end(std::chrono::milliseconds limit = std::chrono::seconds(30));

 private:
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }

  int64_t global_rank_;
  std::atomic<bool> is_open_{false};
  std::atomic<std::thread::id> thread_{};  // that runs it
  std::mutex mutex_;
  std::condition_variable ended_;
};

}  // namespace fsdp::internal
