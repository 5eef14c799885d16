// The check of a tensor-parallel model's first steps: plain tensors that meet its
// parameters count as the same on all ranks of the mesh. Ranks that were given different
// batches would train on without an error, with wrong numbers.
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

 private:
  static std::atomic<int>& running();
  void pass();

  std::atomic<bool> has_backward_ = false, has_passed_ = false;
};

// Of one parameter: a module that no backward ever follows is compared a few times only.
struct UsesCompared {
  int recording = 0, without_graph = 0;
};

// Until the first step has passed: compares the plain operands of `op`, a layer's, over
// the mesh of the first parameter among them. Collective over that mesh where it
// compares: one all-gather of a word per operand. Throws ValueError on every rank, naming
// the module, the operand and the ranks, where one is not the same: another shape, other
// numbers, or real numbers that differ by more than rounding.
void compare_first_inputs(const c10::OperatorHandle& op, const GateArguments& arguments);

}  // namespace fsdp::internal
