#include "fully_shard/step/gradient_hook.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/fsdp_param_group.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(const at::Tensor& member, c10::intrusive_ptr<FSDPParamGroup> group, int64_t index)
      : group_(std::move(group)), index_(index) {
    if (is_dtensor(member)) letting_go_.emplace(member);
  }
  void operator()(const at::Tensor&) override {
    group_->info().driver().gradient_arrived(*group_, index_);
  }

 private:
  c10::intrusive_ptr<FSDPParamGroup> group_;  // the group knows the member weakly: no cycle
  int64_t index_;
  std::optional<LettingGoOfMeta> letting_go_;  // of a tensor-parallel member
};

}  // namespace

void set_gradient_hook(const at::Tensor& member, c10::intrusive_ptr<FSDPParamGroup> group,
                       int64_t index) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      member, std::make_unique<GradientHook>(member, std::move(group), index));
}

}  // namespace fsdp::internal
