// What a deferred initialisation did: the operators that made and changed tensors whose
// values nobody computed yet, in their order. A value is one storage, known by its
// number. Storages (deferred_storage.h) own the tape; the tape owns no storage, so it
// goes with the last tensor that needs it.
//
// Used by one thread at a time.
#pragma once

#include "deferred_init/step_dependencies.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp::internal {

// A tensor without values: which storage, and how it lies there.
struct DeferredTensor {
  int64_t value;
  std::vector<int64_t> sizes, strides;
  int64_t offset;  // elements
  at::ScalarType dtype;
};

// An argument of a recorded operator: as it was given, but for deferred tensors.
using OneArgument = std::variant<c10::IValue, DeferredTensor>;
struct ArgumentList {
  c10::TypePtr element_type;
  std::vector<OneArgument> elements;
};
using Argument = std::variant<c10::IValue, DeferredTensor, ArgumentList>;

struct Step {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  // Of the tensors that the operator returned, in order, those in lists included; none
  // for one that shares an argument's storage.
  std::vector<std::optional<DeferredTensor>> results = {};
  // What a new tensor's memory was to be: small ones have some, for the program to write
  // past operators before an operator does. Undefined for none.
  at::Tensor raw = {};
  // Of the generator before the operator drew from it; undefined: it draws nothing.
  at::Tensor generator_state = {};
};

class Tape {
 public:
  // The tape that this thread records to: one for as long as a tensor on it lives.
  static std::shared_ptr<Tape> current();

  int64_t new_value(int64_t nbytes);
  int64_t nbytes(int64_t value) const { return nbytes_[static_cast<size_t>(value)]; }
  // `reads`, `writes`: values, as StepDependencies takes them.
  void add(Step step, std::vector<int64_t> reads, const std::vector<int64_t>& writes);
  int64_t size() const { return dependencies_.size(); }
  const Step& step(int64_t index) const { return steps_[static_cast<size_t>(index)]; }
  const StepDependencies& dependencies() const { return dependencies_; }

 private:
  std::vector<Step> steps_;
  std::vector<int64_t> nbytes_;  // by value
  StepDependencies dependencies_;
};

}  // namespace fsdp::internal
