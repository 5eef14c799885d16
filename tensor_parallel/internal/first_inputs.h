// The check of a tensor-parallel model's first steps: plain tensors that meet its
// parameters, or what it computed with them (targets, masks, positions), count as the
// same on all ranks of the mesh. Ranks that were given different batches would train on
// without an error, with wrong numbers.
#pragma once

#include "on_demand/gate_arguments.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>

namespace fsdp::internal {

// How far a module that was parallelized has come; shared by its parameters. It passes
// its first step with the first forward after a backward.
class FirstSteps {
 public:
  FirstSteps() { running() += 1; }
  ~FirstSteps();
  FirstSteps(const FirstSteps&) = delete;
  FirstSteps& operator=(const FirstSteps&) = delete;

  // Whether some module of this process is in its first step.
  static bool any() { return running().load(std::memory_order_relaxed) > 0; }

  bool has_passed() const { return has_passed_; }
  void saw_backward() { has_backward_ = true; }
  void saw_forward();
  // The first step is over, or none follows: the module only computes.
  void pass();
  // Whether one more operator beside activations is to be compared: of a module that no
  // backward ever follows a thousand are.
  bool compares_another() const { return compared_ < kCompared; }
  void count_compared() { ++compared_; }

 private:
  static constexpr int kCompared = 1024;
  static std::atomic<int>& running();

  std::atomic<bool> has_backward_ = false, has_passed_ = false;
  std::atomic<int> compared_ = 0;
};

// Of one parameter: a module that no backward ever follows is compared a few times only,
// and no longer looked at once a parameter was used often. Comparisons are collective, so
// one thread at a time counts here.
struct UsesCompared {
  int recording = 0, without_graph = 0;
  int uses = 0;  // compared or not
};

// Until the first step has passed: compares the plain operands of `op`, a layer's, over
// the mesh of the first parameter among them. Collective over that mesh where it
// compares: one all-gather of a word per operand. Throws ValueError on every rank, naming
// the module, the operand and the ranks, where one is not the same: another shape, other
// numbers, or real numbers that differ by more than rounding (infinities and NaNs by
// where they are). Without a parameter among the operands it is
// compare_beside_activations().
void compare_first_inputs(const c10::OperatorHandle& op, const GateArguments& arguments);

// The same for any other operator of a forward: until the first step of the module whose
// parameter this thread met last has passed, compares what is plain beside what was
// computed on a mesh. Only where autograd records that, and nothing plain is written:
// what a rank looks at by itself (under no_grad, of detach()) is no collective, and
// neither is what it does with to_local(). Nor is anything compared beside what comes
// from a parameter of fully_shard (implicit_replication.h), or where
// DebugOptions::check_replicated compares all. So the ranks of a mesh compare alike if
// they run the same operators. Names the operator, the operand and the coordinates.
void compare_beside_activations(const c10::OperatorHandle& op, const GateArguments& arguments);

}  // namespace fsdp::internal
