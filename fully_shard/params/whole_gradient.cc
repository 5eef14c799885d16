#include "fully_shard/params/whole_gradient.h"

#include "dtensor/dtensor.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace fsdp::internal {
namespace {

using torch::autograd::variable_list;

// As the engine does when the gradient of a leaf is there.
void accumulate(const at::Tensor& member, const at::Tensor& gradient) {
  variable_list gradients{gradient};
  for (const auto& hook : torch::autograd::impl::hooks(member)) gradients = (*hook)(gradients);
  (*torch::autograd::impl::grad_accumulator(member))(std::move(gradients));
}

// Before the entry's gradient is accumulated. Belongs to the graph, which ends it.
class WholeGradientHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit WholeGradientHook(at::Tensor member) : member_(std::move(member)) {}

  variable_list operator()(const variable_list& gradients) override {
    const at::Tensor& gradient = gradients.front();
    if (!gradient.defined() || is_dtensor(gradient)) return gradients;
    at::Tensor member = member_;
    if (!member.requires_grad()) member.set_requires_grad(true);  // the entry does, or did
    accumulate(member, gradient);
    return {at::Tensor()};
  }

 private:
  at::Tensor member_;
};

bool is_led(const torch::autograd::Node& accumulator) {
  const auto& hooks = accumulator.pre_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const WholeGradientHook*>(hook.get()) != nullptr;
  });
}

}  // namespace

void lead_whole_gradients(const at::Tensor& entry, const at::Tensor& member) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(entry);
  if (accumulator == nullptr || is_led(*accumulator)) return;
  accumulator->add_pre_hook(std::make_unique<WholeGradientHook>(member));
}

}  // namespace fsdp::internal
