#include "fully_shard/params/group_creation.h"

#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/gradient_hook.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/units/unit_device.h"
#include "on_demand/deferred_part.h"
#include "on_demand/gate_key.h"

#include <optional>
#include <utility>

namespace fsdp::internal {

class GroupCreation {
 public:
  explicit GroupCreation(c10::intrusive_ptr<ParamGroup> group) : group_(std::move(group)) {}

  void open_shards(c10::Device device) { group_->open_shards(device); }

  void set_precision(const MixedPrecisionPolicy& precision) {
    group_->gradients_.set_reduce_dtype(precision.reduce_dtype);
    if (!precision.param_dtype || !precision.cast_forward_inputs) return;
    for (auto& param : group_->params_) param.cast_inputs();
  }

  // The entry of one parameter; its tensor is a member then.
  at::Tensor adopt(int64_t index, const at::Tensor& tensor) {
    auto& param = group_->params_[static_cast<size_t>(index)];
    const auto& shards = *group_->shards_;
    if (group_->has_values()) {
      group_->take_start_value(index, held_part(tensor));
    } else {
      param.set_without_values(held_part(tensor).detach());
    }
    if (is_deferred_part(tensor)) release_part(tensor);
    auto owner = c10::make_intrusive<RegistryEntry>(group_, tensor, index);
    auto entry = make_dtensor(shards.local_view(index, param), param.spec(), std::move(owner));
    entry.set_requires_grad(tensor.requires_grad());
    param.set_entry(entry);
    group_->make_member(index);
    set_gradient_hook(tensor, group_, index);
    return entry;
  }

 private:
  c10::intrusive_ptr<ParamGroup> group_;
};

namespace {

std::optional<DeviceMesh> mesh_of_members(const std::vector<NewParam>& params) {
  for (const auto& param : params) {
    if (const auto* const meta = find_meta(param.tensor)) return meta->spec.mesh();
  }
  return std::nullopt;
}

}  // namespace

std::vector<at::Tensor> create_group(const DeviceMesh& mesh, std::shared_ptr<ShardDim> dim,
                                     std::shared_ptr<Transport> replicas,
                                     std::shared_ptr<Unit> unit,
                                     std::shared_ptr<GroupDriver> driver,
                                     const std::vector<NewParam>& params,
                                     const MixedPrecisionPolicy& precision) {
  const RuntimeMode runtime_mode;
  install_gate();
  std::vector<ShardedParam> sharded;
  sharded.reserve(params.size());
  const UnitMesh over{mesh, mesh_of_members(params)};
  for (const auto& [name, tensor, dim] : params)
    sharded.emplace_back(name, tensor, dim, over, precision.param_dtype);
  GroupCreation creation(c10::make_intrusive<ParamGroup>(mesh, std::move(dim), std::move(replicas),
                                                         std::move(unit), std::move(driver),
                                                         std::move(sharded)));
  creation.open_shards(device_in_unit(params.front().tensor, mesh));
  creation.set_precision(precision);
  std::vector<at::Tensor> entries;
  for (size_t i = 0; i < params.size(); ++i) {
    entries.push_back(creation.adopt(static_cast<int64_t>(i), params[i].tensor));
  }
  return entries;
}

}  // namespace fsdp::internal
