// The tensors among the boxed arguments of an operator, those inside lists included.
// Visiting copies nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <string_view>
#include <utility>

namespace fsdp::internal {

class TensorArguments {
 public:
  // REQUIRES: the arguments are on top of `stack`.
  TensorArguments(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()), first_(&*stack.end() - schema_.arguments().size()) {}

  const c10::FunctionSchema& schema() const { return schema_; }
  bool is_aten() const { return std::string_view(schema_.name()).starts_with("aten::"); }
  size_t size() const { return schema_.arguments().size(); }
  c10::IValue& operator[](size_t index) { return first_[index]; }
  const c10::IValue& operator[](size_t index) const { return first_[index]; }
  bool writes(size_t index) const {
    const auto* const alias = schema_.arguments()[index].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  // Calls visit(tensor, writes) for every defined tensor.
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (size_t i = 0; i < size(); ++i) {
      if (first_[i].isTensor()) {
        visit_defined(first_[i].toTensor(), writes(i), visit);
      } else if (is_list(first_[i])) {
        for (const auto& element : first_[i].toListRef()) {
          if (element.isTensor()) visit_defined(element.toTensor(), writes(i), visit);
        }
      }
    }
  }

  // Puts replace(tensor) in the place of every defined tensor for which it is defined.
  // True when there was one.
  template <class Replace>
  bool replace_each(const Replace& replace) {
    bool replaced = false;
    for (size_t i = 0; i < size(); ++i) {
      if (first_[i].isTensor()) {
        replaced |= replace_one(first_[i], replace);
      } else if (is_list(first_[i])) {
        replaced |= replace_in_list(first_[i], replace);
      }
    }
    return replaced;
  }

  static bool is_list(const c10::IValue& value) {
    return value.isTensorList() || value.isOptionalTensorList();
  }

 private:
  template <class Visit>
  static void visit_defined(const at::Tensor& tensor, bool writes, const Visit& visit) {
    if (tensor.defined()) visit(tensor, writes);
  }

  template <class Replace>
  static bool replace_one(c10::IValue& value, const Replace& replace) {
    if (!value.toTensor().defined()) return false;
    at::Tensor other = replace(value.toTensor());
    if (!other.defined()) return false;
    value = std::move(other);
    return true;
  }

  // The list may be another's: it is copied, if anything is replaced.
  template <class Replace>
  static bool replace_in_list(c10::IValue& value, const Replace& replace) {
    c10::IValue copy;
    for (size_t k = 0; k < value.toListRef().size(); ++k) {
      c10::IValue element = value.toListRef()[k];
      if (!element.isTensor() || !replace_one(element, replace)) continue;
      if (copy.isNone()) copy = value.toList().copy();
      copy.toList().set(k, std::move(element));
    }
    if (copy.isNone()) return false;
    value = std::move(copy);
    return true;
  }

  const c10::FunctionSchema& schema_;
  c10::IValue* first_;
};

}  // namespace fsdp::internal
