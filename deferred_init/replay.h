// Computes what a tape recorded.
//
//   Replay replay(tape);
//   replay.compute({value}, tape.size());
//   replay.tensor(deferred);          // with its values
//
// Steps that draw random numbers draw what they would have drawn where they were
// recorded, whatever ran since, and leave all generators as they were. Without autograd,
// and past the gate. Memory: what the steps needed for the values make, until
// the object goes.
//
// Used by one thread at a time.
#pragma once

#include "deferred_init/tape.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace fsdp::internal {

class Replay {
 public:
  // Until the object goes, the thread's operators record no gradients and pass the gate.
  explicit Replay(const Tape& tape);
  Replay(const Replay&) = delete;

  // Makes `values` what they were before step `before`. REQUIRES: called once, and before
  // allocate().
  void compute(const std::vector<int64_t>& values, int64_t before);
  // Memory for a value of which nobody asks what is in it. Nothing if it has some.
  void allocate(int64_t value);
  // REQUIRES: its value was computed or allocated.
  at::Tensor tensor(const DeferredTensor& deferred) const;
  // Runs a step on what is there, drawing from the generators that it names.
  void run(const Step& step);

 private:
  void run_again(const Step& step);
  void draw_again(Step step);
  void open(const Step& step);
  torch::jit::Stack arguments(const Step& step) const;
  c10::IValue argument(const OneArgument& argument) const;
  void keep_results(const Step& step, const torch::jit::Stack& stack);
  void keep(const DeferredTensor& deferred, const at::Tensor& result);

  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard past_the_gate_;
  const Tape& tape_;
  std::unordered_map<int64_t, c10::Storage> storages_;  // by value
};

// The tensor that `deferred` stands for, on the CPU, a leaf without gradient.
at::Tensor computed(const at::Tensor& deferred);
// The same for several, which share memory where those do. REQUIRES: of one tape.
std::vector<at::Tensor> computed(const std::vector<at::Tensor>& deferred);

// Whether the operator makes a tensor whose values are nobody's business.
bool leaves_uninitialised(const c10::OperatorHandle& op);
// Whether the operator draws random numbers.
bool draws(const c10::OperatorHandle& op);
// The generator among the arguments, or else what this thread draws from on the CPU.
at::Generator generator_of(const c10::OperatorHandle& op, const std::vector<Argument>& arguments);

// Calls visit(tensor) for the tensors among what an operator returned, those in lists
// included.
template <class Visit>
void for_each_result(at::ArrayRef<c10::IValue> returned, const Visit& visit) {
  for (const auto& value : returned) {
    if (value.isTensor()) visit(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  }
}

}  // namespace fsdp::internal
