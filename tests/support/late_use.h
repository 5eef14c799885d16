// A parameter's gradient that arrives last of all in a backward, when the reduction of
// its unit has left.
//
//   auto y = late_use(x, [&] { return (layer->weight * 3).sum(); }, /*differentiate=*/rank == 0);
//   model->forward(y).sum().backward();   // ends in the backward of that use
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/utils.h>

#include <functional>
#include <utility>

namespace fsdp::testing {

struct Use : torch::CustomClassHolder {
  explicit Use(std::function<at::Tensor()> compute) : compute(std::move(compute)) {}
  std::function<at::Tensor()> compute;
};

// The identity, whose backward computes what it is given on every rank, and
// differentiates that where it is told to. On devices a thread of autograd's runs it.
struct LateUse : torch::autograd::Function<LateUse> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::function<at::Tensor()> use, bool differentiate) {
    context->saved_data["differentiate"] = differentiate;
    context->saved_data["use"] =
        c10::IValue::make_capsule(c10::make_intrusive<Use>(std::move(use)));
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    torch::AutoGradMode grad_mode(true);
    const auto use = context->saved_data["use"].toCapsule();
    const auto value = c10::static_intrusive_pointer_cast<Use>(use)->compute();
    if (context->saved_data["differentiate"].toBool()) value.backward();
    return {gradients[0], {}, {}};
  }
};

inline at::Tensor late_use(const at::Tensor& x, std::function<at::Tensor()> use,
                           bool differentiate) {
  return LateUse::apply(x, std::move(use), differentiate);
}

}  // namespace fsdp::testing
