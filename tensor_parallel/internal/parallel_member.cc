#include "tensor_parallel/internal/parallel_member.h"

#include "device_mesh/internal/weak_registry.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/grad_placement.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/deferred_part.h"
#include "on_demand/pass.h"
#include "tensor_parallel/internal/parallel_gate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

bool is_to_sum(const at::Tensor& member) { return is_sum_of_terms(member.grad(), spec_of(member)); }

void put_home(const at::Tensor& member, const at::Tensor& local) {
  member.mutable_grad() = make_dtensor(local, spec_of(member));
}

void add_home(const at::Tensor& gradient, const at::Tensor& local) {
  local_of(gradient).add_(local);
  gradient.unsafeGetTensorImpl()->bump_version();
}

// Terms of a member's gradient, which are its .grad until they are summed, or are to be
// added to the one that it has from earlier backwards.
struct TermsOf {
  at::Tensor member;
  at::Tensor to_add;  // undefined for none

  const at::Tensor& gradient() const { return to_add.defined() ? to_add : member.grad(); }
  void take(const at::Tensor& sum) const {
    if (to_add.defined() && member.grad().defined()) return add_home(member.grad(), sum);
    put_home(member, sum);
  }
};

// Those of one backward, in the order in which they came.
class Terms {
 public:
  void add(TermsOf terms) {
    const std::lock_guard lock(mutex_);
    terms_.push_back(std::move(terms));
  }
  // Collective.
  void sum_all() {
    const at::NoGradGuard no_grad;
    std::vector<TermsOf> all;
    std::unordered_set<const c10::TensorImpl*> with_own;  // members whose .grad is there
    for (TermsOf& terms : std::exchange(terms_, {})) {
      if (terms.to_add.defined() ||
          (is_to_sum(terms.member) && with_own.insert(terms.member.unsafeGetTensorImpl()).second))
        all.push_back(std::move(terms));
    }
    std::vector<at::Tensor> gradients;
    for (const TermsOf& terms : all) gradients.push_back(terms.gradient());
    const auto sums = sum_terms(gradients);
    for (size_t i = 0; i < all.size(); ++i) all[i].take(sums[i]);
  }

 private:
  std::mutex mutex_;  // devices have backward threads of their own
  std::vector<TermsOf> terms_;
};

// Those of the running backward, which sums them when it ends; a failed one drops them.
std::shared_ptr<Terms> terms_of_backward() {
  static auto& running = *new WeakRegistry<int, Terms>();  // by graph task
  return running.find_or_make(current_graph_task(), [] {
    auto terms = std::make_shared<Terms>();
    torch::autograd::Engine::get_default_engine().queue_callback([terms] { terms->sum_all(); });
    return terms;
  });
}

class GradientHome final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientHome(const at::Tensor& member) : letting_go_(member) {}

  void operator()(const at::Tensor& member) override {
    const at::NoGradGuard no_grad;
    const at::Tensor& grad = member.grad();
    const DTensorSpec& home = spec_of(member);
    if (auto* const style = style_of(member)) style->steps->saw_backward();
    if (is_dtensor(grad) && spec_of(grad).placements() == home.placements()) return;
    if (is_to_sum(member)) return terms_of_backward()->add({member, {}});
    put_home(member, local_at_home(grad, home));
  }

 private:
  LettingGoOfMeta letting_go_;
};

// REQUIRES: `member` is a DTensor and a leaf.
void bring_gradients_home(const at::Tensor& member) {
  torch::autograd::impl::set_post_acc_grad_hooks(member, std::make_unique<GradientHome>(member));
}

// The member into whose gradient the running node accumulates; undefined for none.
at::Tensor accumulating_member() {
  const auto node = torch::autograd::get_current_node();
  const auto* const accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get());
  if (accumulate == nullptr || !is_dtensor(accumulate->variable)) return {};
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(accumulate->variable);
  const bool comes_home = dynamic_cast<const GradientHome*>(hook.get()) != nullptr;
  return comes_home ? accumulate->variable : at::Tensor();
}

bool lies_as(const at::Tensor& tensor, const DTensorSpec& spec) {
  return is_dtensor(tensor) && spec_of(tensor).placements() == spec.placements();
}

}  // namespace

void make_parallel_member(const PlannedParameter& parameter, uint32_t number_of_model,
                          const std::shared_ptr<FirstSteps>& steps) {
  const at::NoGradGuard no_grad;
  install_parallel_gate();
  const at::Tensor& member = parameter.member;
  const at::Tensor local =
      local_part(member.detach(), parameter.spec).clone(at::MemoryFormat::Contiguous);
  const KeysOfNewDTensors parallel{c10::DispatchKeySet(kParallelKey)};
  const at::Tensor becomes = make_dtensor(local, parameter.spec);
  auto style = c10::make_intrusive<MemberStyle>();
  style->uses = parameter.uses;
  style->path = parameter.path;
  style->number_of_model = number_of_model;
  if (parameter.batches == Batches::kOnePerRank) style->batches = parameter.spec.mesh().size();
  style->steps = steps;
  set_style(becomes, std::move(style));
  if (local.is_meta()) make_deferred_part(becomes, parameter.path);
  member.unsafeGetTensorImpl()->shallow_copy_from(becomes.getIntrusivePtr());
  bring_gradients_home(member);
}

MemberStyle* style_of(const at::Tensor& tensor) {
  const auto* const meta = tensor.defined() ? find_meta(tensor) : nullptr;
  return meta == nullptr ? nullptr : static_cast<MemberStyle*>(meta->style.get());
}

const ParameterUses* uses_of(const at::Tensor& tensor) {
  const MemberStyle* const style = style_of(tensor);
  return style == nullptr ? nullptr : &style->uses;
}

bool is_accumulated_at_home(const at::Tensor& gradient, const at::Tensor& more) {
  const at::Tensor member = accumulating_member();
  if (!member.defined() || !member.grad().is_same(gradient)) return false;
  const DTensorSpec& home = spec_of(member);
  if (!lies_as(gradient, home) || !is_dtensor(more) || lies_as(more, home)) return false;
  if (is_sum_of_terms(more, home)) {
    terms_of_backward()->add({member, more});
  } else {
    add_home(gradient, local_at_home(more, home));
  }
  return true;
}

}  // namespace fsdp::internal
