#include "tensor_parallel/internal/gradients_home.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"
#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "on_demand/pass.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>
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

bool is_sum_of_terms(const at::Tensor& grad) {
  return grad.defined() && is_dtensor(grad) &&
         spec_of(grad)->placements[0] == Placement(Partial{Partial::Op::kSum});
}

void put_home(const at::Tensor& member, const at::Tensor& local) {
  member.mutable_grad() = make_dtensor(local, spec_of(member));
}

// Sums the terms of one dtype over the ranks. Collective.
void sum_terms(const std::vector<at::Tensor>& members) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& member : members) flat.push_back(local_of(member.grad()).reshape({-1}));
  const at::Tensor all = at::cat(flat);
  const DeviceMesh& mesh = spec_of(members[0])->mesh;
  IssueLog::of(mesh, 0)->run({.kind = CollectiveKind::kAllReduce,
                              .what = "all-reduce of tensor-parallel gradients",
                              .bytes = static_cast<int64_t>(all.nbytes())},
                             [&] { return all_reduce(mesh.group(), all, ReduceOp::kSum); });
  int64_t offset = 0;
  for (const at::Tensor& member : members) {
    put_home(member, all.narrow(0, offset, member.numel()).view(member.sizes()));
    offset += member.numel();
  }
}

bool contains(const std::vector<at::Tensor>& members, const at::Tensor& member) {
  return std::any_of(members.begin(), members.end(),
                     [&](const at::Tensor& each) { return each.is_same(member); });
}

bool travel_together(const at::Tensor& one, const at::Tensor& other) {
  return one.grad().scalar_type() == other.grad().scalar_type() &&
         spec_of(one)->mesh == spec_of(other)->mesh;
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
    while (!members_.empty()) {
      std::vector<at::Tensor> alike, others;
      for (const at::Tensor& member : members_) {
        if (!is_sum_of_terms(member.grad()) || contains(alike, member)) continue;
        const bool fits = alike.empty() || travel_together(alike.front(), member);
        (fits ? alike : others).push_back(member);
      }
      if (!alike.empty()) sum_terms(alike);
      members_ = std::move(others);
    }
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
  void operator()(const at::Tensor& member) override {
    const at::NoGradGuard no_grad;
    const at::Tensor grad = member.grad();
    const DTensorSpec& home = *spec_of(member);
    if (!is_dtensor(grad)) return put_home(member, local_part(grad, home));
    if (spec_of(grad)->placements == home.placements) return;
    if (is_sum_of_terms(grad) && home.placements[0].is_replicate())
      return terms_of_backward()->add(member);
    put_home(member, redistribute_local(local_of(grad), *spec_of(grad), home.placements));
  }
};

}  // namespace

void bring_gradients_home(const at::Tensor& member) {
  torch::autograd::impl::set_post_acc_grad_hooks(member, std::make_unique<GradientHome>());
}

}  // namespace fsdp::internal
