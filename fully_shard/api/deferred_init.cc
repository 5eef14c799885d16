#include "fully_shard/deferred_init.h"

#include "deferred_init/deferred_storage.h"
#include "deferred_init/recorder.h"
#include "deferred_init/replay.h"
#include "device_mesh/module_ref.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/group_builder.h"
#include "fully_shard/params/registry_entry.h"
#include "fully_shard/summon_full_params.h"
#include "fully_shard/units/module_tree.h"
#include "fully_shard/units/unit.h"
#include "on_demand/deferred_part.h"
#include "on_demand/gate_key.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using internal::DeferredStorage;
using internal::FSDPParamGroup;
using internal::held_part;
using internal::ModuleTree;
using GroupPtr = c10::intrusive_ptr<FSDPParamGroup>;

c10::DispatchKey ready_gate() {
  internal::install_gate();
  internal::enable_recording();
  return internal::kGateKey;
}

// A tensor of the meta device that no unit has.
struct PlainTensor {
  at::Tensor tensor;
  c10::Device device;  // where it is to be
};

// What is on the meta device at and below a module, each once.
class WithoutValues {
 public:
  explicit WithoutValues(torch::nn::Module& module) {
    const ModuleTree tree({&module});
    for (size_t place = 0; place < tree.size(); ++place) {
      for (const auto& slot : internal::slots_of(tree.module(place)))
        look(tree, place, slot.key, internal::registered(slot));
      for (const auto& buffer : tree.module(place).named_buffers(/*recurse=*/false))
        look(tree, place, buffer.key(), buffer.value());
    }
  }

  std::vector<GroupPtr> groups;
  std::vector<PlainTensor> plain;
  std::set<const torch::nn::Module*> to_initialise;  // they have one that nobody recorded
  std::vector<std::string> names_to_initialise;

 private:
  void look(const ModuleTree& tree, size_t place, const std::string& key,
            const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_meta()) return;
    const auto managed = internal::find_managed_tensor(tensor);
    if (!is_recorded(tensor, managed)) {
      to_initialise.insert(&tree.module(place));
      names_to_initialise.push_back(tree.path_of(place, key));
    }
    if (!seen_.insert(tensor.unsafeGetTensorImpl()).second) return;
    if (!managed.group) {
      return plain.push_back({tensor, device_of(tensor, tree.nearest_unit(place))});
    }
    if (known_groups_.insert(managed.group.get()).second) groups.push_back(managed.group);
  }

  // A tensor-parallel one's is its mesh's.
  static c10::Device device_of(const at::Tensor& tensor,
                               const std::shared_ptr<internal::Unit>& unit) {
    if (is_dtensor(tensor)) return local_device(internal::spec_of(tensor).mesh());
    return unit ? unit->device : c10::Device(c10::kCPU);
  }

  static bool is_recorded(const at::Tensor& tensor, const internal::ManagedTensor& managed) {
    if (!managed.group) return DeferredStorage::of(held_part(tensor)) != nullptr;
    const auto& param = managed.group->params()[static_cast<size_t>(managed.index)];
    return DeferredStorage::of(param.without_values()) != nullptr;
  }

  std::set<const c10::TensorImpl*> seen_;
  std::set<const FSDPParamGroup*> known_groups_;
};

at::Tensor value_of(const at::Tensor& without_values) {
  return DeferredStorage::of(without_values) ? internal::computed(without_values) : at::Tensor();
}

void give_values(const at::Tensor& tensor, const at::Tensor& values) {
  if (internal::is_deferred_part(tensor)) return internal::give_part(tensor, values);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(values.detach().getIntrusivePtr());
}

// Those of one tape together, so that what shares memory goes on sharing it.
void materialize_plain(const std::vector<PlainTensor>& plain) {
  std::map<const internal::Tape*, std::vector<PlainTensor>> by_tape;
  for (const auto& each : plain) {
    const at::Tensor& part = held_part(each.tensor);
    if (const auto* storage = DeferredStorage::of(part)) {
      by_tape[storage->tape().get()].push_back(each);
    } else {
      give_values(each.tensor, at::zeros(part.sizes(), part.options().device(each.device)));
    }
  }
  for (const auto& [tape, recorded] : by_tape) {
    std::vector<at::Tensor> deferred;
    for (const auto& each : recorded) deferred.push_back(held_part(each.tensor));
    const auto values = internal::computed(deferred);
    for (size_t i = 0; i < values.size(); ++i)
      give_values(recorded[i].tensor, values[i].to(recorded[i].device));
  }
}

// fully_shard left those of the meta device as they were.
void cast_buffers_below(torch::nn::Module& module) {
  const ModuleTree tree({&module});
  for (size_t place = 0; place < tree.size(); ++place) {
    if (tree.unit(place)) tree.unit(place)->cast_buffers();
  }
}

}  // namespace

internal::DeferredInit::DeferredInit() : to_the_gate_(ready_gate()) {}

void materialize(ModuleRef module, const std::function<void(torch::nn::Module&)>& initialise) {
  auto& root = internal::given_module("materialize", module);
  const WithoutValues found(root);
  TORCH_CHECK_VALUE(found.to_initialise.empty() || initialise,
                    "materialize: nothing says what values these tensors of the meta device are "
                    "to have: '",
                    c10::Join("', '", found.names_to_initialise),
                    "'. Build the model in fsdp::deferred_init, or give a function that "
                    "initialises modules");
  const at::NoGradGuard no_grad;
  for (const auto& group : found.groups)
    internal::materialize(*group, group->info().unit().device, value_of);
  materialize_plain(found.plain);
  if (!found.to_initialise.empty()) {
    apply_unsharded(root, [&](torch::nn::Module& each) {
      if (found.to_initialise.contains(&each)) initialise(each);
    });
  }
  cast_buffers_below(root);
}

}  // namespace fsdp
