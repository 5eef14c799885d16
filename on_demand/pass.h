// Which pass the calling thread is in: training forward, inference, forward of a
// checkpointed region, recomputation of that region, or backward. It follows from grad
// mode, from the graph task that autograd is running, and from CheckpointedForward.
#pragma once

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
inline bool owes_reduction(Pass pass) {
  return pass == Pass::kTraining || pass == Pass::kCheckpointed || pass == Pass::kRecompute;
}
inline bool records_gradients(Pass pass) {
  return pass == Pass::kTraining || pass == Pass::kRecompute;
}

}  // namespace fsdp::internal
