// One operator on its way through the DTensor key: its boxed arguments and what its
// schema says of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

// What an operator's schema, and its entry of the table, say of it. Worked out once.
struct OperatorTraits {
  explicit OperatorTraits(const c10::OperatorHandle& op);

  std::vector<size_t> written;  // arguments the operator writes in place
  std::vector<std::optional<size_t>>
      returned_argument;        // per return: the written argument it hands back
  std::vector<size_t> numbers;  // arguments that are real numbers, or lists of such
  bool draws_random_numbers;
  bool overwrites = false;  // OpEntry::overwrites, and it writes in place
  bool indexes_self;        // reads or writes `self` at indices, which may be plain tensors
};

class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, const OperatorTraits& traits,
               c10::DispatchKeySet keys, torch::jit::Stack* stack);

  std::string name() const;  // "aten::add_.Tensor"
  const OperatorTraits& traits() const { return traits_; }
  size_t argument_count() const { return argument_count_; }
  c10::IValue& argument(size_t index) { return (*stack_)[base_ + index]; }
  const c10::IValue& argument(size_t index) const { return (*stack_)[base_ + index]; }
  // A copy of all arguments.
  torch::jit::Stack arguments() const;
  const c10::OperatorHandle& handle() const { return op_; }
  // By schema name; null when the operator has no such argument. Slow: compares names.
  c10::IValue* find_argument(const char* name);

  // Runs the operator on the arguments as they are now and returns its results; the
  // arguments are gone.
  std::vector<c10::IValue> run();
  // The same without a list: the results take the arguments' place, for result(), and the
  // call is finished.
  void run_in_place();
  c10::IValue& result(size_t index) { return (*stack_)[base_ + index]; }
  // Runs the operator's composite kernel, whose own operators come back here one by one.
  // Leaves the results in place.
  void decompose();
  // Replaces the arguments, if they are still there, by the results.
  void finish(std::vector<c10::IValue> results);
  void finish(c10::IValue result);

  // Every tensor among the arguments, those inside lists included.
  std::vector<at::Tensor> tensors() const;
  // "aten::mm on (shape [4, 4] placed (Shard(0)) on ..., plain tensor of shape [4])".
  std::string description() const;

 private:
  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack* stack_;
  size_t argument_count_;
  size_t base_;
};

// What one operand is, for messages.
std::string describe(const at::Tensor& tensor);

}  // namespace fsdp::internal
