#include "tensor_parallel/internal/gradients_home.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/home_placement.h"
#include "on_demand/pass.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

bool is_to_sum(const at::Tensor& member) { return is_sum_of_terms(member.grad(), spec_of(member)); }

void put_home(const at::Tensor& member, const at::Tensor& local) {
  member.mutable_grad() = make_dtensor(local, spec_of(member));
}

// Collective.
void sum_grads(const std::vector<at::Tensor>& members) {
  std::vector<at::Tensor> grads;
  for (const at::Tensor& member : members) grads.push_back(member.grad());
  const auto sums = sum_terms(grads);
  for (size_t i = 0; i < members.size(); ++i) put_home(members[i], sums[i]);
}

bool contains(const std::vector<at::Tensor>& members, const at::Tensor& member) {
  return std::any_of(members.begin(), members.end(),
                     [&](const at::Tensor& each) { return each.is_same(member); });
}

// The members of one backward whose gradients are terms, in the order in which they came.
class Terms {
 public:
  void add(const at::Tensor& member) {
    const std::lock_guard lock(mutex_);
    members_.push_back(member);
  }
  // Collective.
  void sum_all() {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> members;
    for (const at::Tensor& member : members_) {
      if (is_to_sum(member) && !contains(members, member)) members.push_back(member);
    }
    members_.clear();
    sum_grads(members);
  }

 private:
  std::mutex mutex_;  // devices have backward threads of their own
  std::vector<at::Tensor> members_;
};

// Those of the running backward, which sums them when it ends; a failed one drops them.
std::shared_ptr<Terms> terms_of_backward() {
  static std::mutex mutex;
  static auto& running = *new std::map<int, std::weak_ptr<Terms>>();
  const std::lock_guard lock(mutex);
  std::erase_if(running, [](const auto& item) { return item.second.expired(); });
  std::weak_ptr<Terms>& known = running[current_graph_task()];
  if (auto terms = known.lock()) return terms;
  auto terms = std::make_shared<Terms>();
  known = terms;
  torch::autograd::Engine::get_default_engine().queue_callback([terms] { terms->sum_all(); });
  return terms;
}

class GradientHome final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientHome(const at::Tensor& member) : letting_go_(member) {}

  void operator()(const at::Tensor& member) override {
    const at::NoGradGuard no_grad;
    const at::Tensor grad = member.grad();
    const DTensorSpec& home = spec_of(member);
    if (is_dtensor(grad) && spec_of(grad).placements() == home.placements()) return;
    if (is_to_sum(member)) return terms_of_backward()->add(member);
    put_home(member, local_at_home(grad, home));
  }

 private:
  LettingGoOfMeta letting_go_;
};

}  // namespace

void bring_gradients_home(const at::Tensor& member) {
  torch::autograd::impl::set_post_acc_grad_hooks(member, std::make_unique<GradientHome>(member));
}

}  // namespace fsdp::internal
