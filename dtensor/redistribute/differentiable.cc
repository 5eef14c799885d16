#include "dtensor/redistribute/differentiable.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace fsdp::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;
using torch::autograd::variable_list;

// Carries a spec through an AutogradContext.
struct SavedSpec final : torch::CustomClassHolder {
  explicit SavedSpec(DTensorSpec saved) : spec(std::move(saved)) {}
  DTensorSpec spec;
};

void save_spec(AutogradContext* context, DTensorSpec spec) {
  context->saved_data["spec"] =
      c10::IValue::make_capsule(c10::make_intrusive<SavedSpec>(std::move(spec)));
}

DTensorSpec saved_spec(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<SavedSpec>(context->saved_data["spec"].toCapsule())
      ->spec;
}

DTensorSpec gradient_spec(const DTensorSpec& spec) { return spec.without_partials(); }

// A gradient that arrives as `grad`, placed as `spec`. Collective where it must move.
at::Tensor placed_gradient(const at::Tensor& grad, const DTensorSpec& spec) {
  if (!is_dtensor(grad)) return make_dtensor(local_part(grad, spec), spec);
  const CommCauseScope cause(CommCause::kGradient);
  return differentiable_redistribute(grad, spec.placements());
}

// The local tensor itself, which whoever gets it may write.
at::Tensor given_out(const at::Tensor& dtensor) {
  tell_read(dtensor);
  if (auto* const owner = owner_of(dtensor)) owner->local_given_out();
  return local_of(dtensor).detach();
}

// The backward functions are differentiable themselves, for second derivatives.
class ToLocal : public torch::autograd::Function<ToLocal> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& dtensor,
                            const DTensorSpec& gradient) {
    save_spec(context, gradient);
    return given_out(dtensor);
  }
  static tensor_list backward(AutogradContext* context, const variable_list& grads) {
    return {differentiable_from_local(grads[0], saved_spec(context)), at::Tensor()};
  }
};

// A term of an average counts for one part of it.
at::Tensor gradient_of_term(at::Tensor grad, const DTensorSpec& spec) {
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (spec.placements()[m] == Placement(Partial{Partial::Op::kAvg})) {
      grad = grad.div(spec.mesh().size(static_cast<int64_t>(m)));
    }
  }
  return grad;
}

class FromLocal : public torch::autograd::Function<FromLocal> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local,
                            const DTensorSpec& spec) {
    save_spec(context, spec);
    return make_dtensor(local.detach(), spec);
  }
  static tensor_list backward(AutogradContext* context, const variable_list& grads) {
    const auto spec = saved_spec(context);
    const at::Tensor whole = placed_gradient(grads[0], gradient_spec(spec));
    return {gradient_of_term(differentiable_to_local(whole), spec), at::Tensor()};
  }
};

class Redistribute : public torch::autograd::Function<Redistribute> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& dtensor,
                            const std::vector<Placement>& placements) {
    save_spec(context, gradient_spec(spec_of(dtensor)));
    tell_read(dtensor);
    return redistribute_dtensor(dtensor, placements);
  }
  static tensor_list backward(AutogradContext* context, const variable_list& grads) {
    return {placed_gradient(grads[0], saved_spec(context)), at::Tensor()};
  }
};

// The gradient of a minimum, maximum or product goes to terms that depend on the other
// ranks' values.
void check_terms_have_gradients(const DTensorSpec& spec) {
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    const Placement& placement = spec.placements()[m];
    const bool linear = !placement.is_partial() || placement.partial_op() == Partial::Op::kSum ||
                        placement.partial_op() == Partial::Op::kAvg;
    TORCH_CHECK_NOT_IMPLEMENTED(
        linear || spec.mesh().size(static_cast<int64_t>(m)) == 1, "from_local: local: it ",
        "requires grad, and terms of ", placement, " have no gradient rule; pass ",
        "local.detach(), or Partial(sum) or Partial(avg) terms (rank ", spec.mesh().rank(), ")");
  }
}

bool records(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

}  // namespace

at::Tensor differentiable_to_local(const at::Tensor& dtensor,
                                   const std::optional<DTensorSpec>& gradient) {
  if (records(dtensor))
    return ToLocal::apply(dtensor, gradient.value_or(gradient_spec(spec_of(dtensor))));
  return given_out(dtensor);
}

at::Tensor differentiable_from_local(const at::Tensor& local, const DTensorSpec& spec) {
  if (!records(local)) return make_dtensor(local.detach(), spec);
  check_terms_have_gradients(spec);
  return FromLocal::apply(local, spec);
}

at::Tensor differentiable_redistribute(const at::Tensor& dtensor,
                                       const std::vector<Placement>& placements) {
  if (spec_of(dtensor).placements() == placements) return dtensor;
  if (records(dtensor)) return Redistribute::apply(dtensor, placements);
  tell_read(dtensor);
  return redistribute_dtensor(dtensor, placements);
}

namespace {

class WholeGradients final : public torch::autograd::FunctionPreHook {
 public:
  variable_list operator()(const variable_list& grads) override {
    variable_list whole = grads;
    for (at::Tensor& grad : whole) {
      if (!grad.defined() || !is_dtensor(grad)) continue;
      const CommCauseScope cause(CommCause::kGradient);
      grad = differentiable_to_local(
          differentiable_redistribute(grad, spec_of(grad).replicated().placements()));
    }
    return whole;
  }
};

}  // namespace

void bring_gradient_whole(const at::Tensor& plain) {
  const auto& node = plain.grad_fn();
  if (node == nullptr) return;
  auto& hooks = node->tensor_pre_hooks();
  const bool is_there = std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const WholeGradients*>(hook.get()) != nullptr;
  });
  if (!is_there) node->add_tensor_pre_hook(std::make_unique<WholeGradients>());
}

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace fsdp::internal
