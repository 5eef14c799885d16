#include "fully_shard/params/optimizer_tripwire.h"

#include "fully_shard/params/param_group.h"
#include "on_demand/gate_key.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

class Tripwire final : public OnDemandGroup {
 public:
  Tripwire(ParamGroup& group, std::string name)
      : group_(c10::intrusive_ptr<ParamGroup>::reclaim_copy(&group)), name_(std::move(name)) {}

  void touch() override {
    if (const auto group = group_.lock()) group->forget_writes();
    TORCH_CHECK_VALUE(false, "the .grad of the member '", name_,
                      "' was read. Gradients of sharded parameters are on "
                      "module->parameters(), as DTensors. Was the optimizer built before "
                      "fully_shard? Build it after, "
                      "from module->parameters()");
  }
  bool is_member(int64_t, const c10::TensorImpl*) const override { return false; }
  void synchronize_metadata(int64_t, c10::TensorImpl*) override {}
  void mark_written(int64_t) override {}
  void evict_and_poison() override {}
  void storage_destroyed(int64_t, const OnDemandStorage*) noexcept override {}
  const std::string& parameter_name(int64_t) const override { return name_; }

 private:
  c10::weak_intrusive_ptr<ParamGroup> group_;
  std::string name_;
};

class RemoveTripwire final : public torch::autograd::FunctionPreHook {
 public:
  explicit RemoveTripwire(const at::Tensor& member) : member_(member.getIntrusivePtr()) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    const at::Tensor member(member_.lock());
    if (member.defined() && is_tripwire(member.grad())) member.mutable_grad().reset();
    return gradients;
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> member_;
};

}  // namespace

at::Tensor make_tripwire(const at::Tensor& member, ParamGroup& group, int64_t index) {
  auto storage = c10::make_intrusive<OnDemandStorage>(
      c10::make_intrusive<Tripwire>(group, group.parameter_name(index)), 0,
      static_cast<int64_t>(member.nbytes()), member.device());
  const auto keys = c10::DispatchKeySet(
      c10::computeDispatchKey(member.scalar_type(), c10::kStrided, member.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))), keys.add(kGateKey),
      member.dtype());
  impl->set_sizes_and_strides(member.sizes(), member.strides());
  return at::Tensor(std::move(impl));
}

bool is_tripwire(const at::Tensor& gradient) {
  if (!gradient.defined()) return false;
  const auto* storage = OnDemandStorage::of(gradient.unsafeGetTensorImpl());
  return storage != nullptr && dynamic_cast<const Tripwire*>(&storage->group()) != nullptr;
}

void remove_tripwire_before_accumulation(const at::Tensor& member) {
  torch::autograd::impl::add_hook(member, std::make_unique<RemoveTripwire>(member));
}

}  // namespace fsdp::internal
