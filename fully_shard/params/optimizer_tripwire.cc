#include "fully_shard/params/optimizer_tripwire.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/params/shard_writes.h"
#include "on_demand/gate_arguments.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"
#include "on_demand/pass.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <string>
#include <typeinfo>
#include <utility>

namespace fsdp::internal {
namespace {

class Tripwire final : public Touchable {
 public:
  Tripwire(std::string name, std::weak_ptr<ShardWrites> writes)
      : name_(std::move(name)), writes_(std::move(writes)) {}

  void guard(OnDemandStorage& storage) { storage_ = &storage; }
  bool is_untouched() const { return !zeros_.defined(); }

  void touch() override {
    if (zeros_.defined()) return;
    if (current_graph_task() != -1) return become_zeros();
    if (const auto writes = writes_.lock()) writes->copy_discarded();
    TORCH_CHECK_VALUE(false, "the .grad of the member '", name_,
                      "' was read. Gradients of sharded parameters are on module->parameters(), as "
                      "DTensors; read them there (of the whole: "
                      "fsdp::DTensor(parameter.grad()).full_tensor(), collective). An optimizer "
                      "that was built before fully_shard, as in a constructor, has the members: "
                      "optimizer.param_groups()[0].params() = module->parameters() gives it what "
                      "it is to train");
  }
  void storage_destroyed(int64_t, const OnDemandStorage*) noexcept override { storage_ = nullptr; }
  const std::string& parameter_name(int64_t) const override { return name_; }

 private:
  void become_zeros() {
    const RuntimeMode runtime_mode;
    zeros_ = at::zeros({static_cast<int64_t>(storage_->nbytes())},
                       at::TensorOptions().dtype(at::kByte).device(storage_->device()));
    storage_->fill(zeros_.data_ptr());
  }

  std::string name_;
  std::weak_ptr<ShardWrites> writes_;
  OnDemandStorage* storage_ = nullptr;
  at::Tensor zeros_;
};

const Tripwire* tripwire_of(const at::Tensor& gradient) {
  if (!gradient.defined() || !meets_gate(gradient)) return nullptr;
  const auto* storage = OnDemandStorage::behind(gradient);
  if (storage == nullptr) return nullptr;
  const auto& group = storage->group();
  return typeid(group) == typeid(Tripwire) ? static_cast<const Tripwire*>(&group) : nullptr;
}

}  // namespace

at::Tensor make_tripwire(const at::Tensor& member, const std::string& name,
                         std::weak_ptr<ShardWrites> writes) {
  const at::Tensor& part = held_part(member);
  auto tripwire = c10::make_intrusive<Tripwire>(name, std::move(writes));
  auto storage = c10::make_intrusive<OnDemandStorage>(tripwire, static_cast<int64_t>(part.nbytes()),
                                                      member.device());
  tripwire->guard(*storage);
  const auto keys = c10::DispatchKeySet(
      c10::computeDispatchKey(member.scalar_type(), c10::kStrided, member.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))), keys.add(kGateKey),
      member.dtype());
  impl->set_sizes_and_strides(part.sizes(), part.strides());
  at::Tensor local(std::move(impl));
  if (!is_dtensor(member)) return local;
  const KeysOfNewDTensors met_by_gate{c10::DispatchKeySet(kGateKey)};
  return make_dtensor(local, spec_of(member));
}

bool is_untouched_tripwire(const at::Tensor& gradient) {
  const auto* tripwire = tripwire_of(gradient);
  return tripwire != nullptr && tripwire->is_untouched();
}

}  // namespace fsdp::internal
