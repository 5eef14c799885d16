#include "fully_shard/units/shared_storage.h"

#include "dtensor/internal/dtensor_impl.h"
#include "fully_shard/units/module_tree.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <string>
#include <unordered_map>
#include <utility>

namespace fsdp::internal {
namespace {

// A registered tensor and what it is called.
struct Registered {
  const c10::TensorImpl* impl;
  std::string name;  // "parameter 'l0.weight'"
};
using ByStorage = std::unordered_multimap<const c10::StorageImpl*, Registered>;

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

ByStorage registered_below(const std::vector<torch::nn::Module*>& modules) {
  ByStorage found;
  const ModuleTree tree(modules);
  const auto add = [&found](const at::Tensor& tensor, const char* kind, const std::string& path) {
    if (!tensor.defined() || !held_part(tensor).has_storage()) return;
    found.emplace(storage_of(held_part(tensor)),
                  Registered{tensor.unsafeGetTensorImpl(), kind + (" '" + path + "'")});
  };
  for (size_t i = 0; i < tree.size(); ++i) {
    for (const auto& slot : slots_of(tree.module(i)))
      add(registered(slot), "parameter", tree.path_of(i, slot.key));
    for (const auto& item : tree.module(i).named_buffers(/*recurse=*/false))
      add(item.value(), "buffer", tree.path_of(i, item.key()));
  }
  return found;
}

// The handles of its storage that a tensor accounts for: its own, and that of the tensor
// it is a view of, where nobody else has that any more.
int64_t own_handles(const at::Tensor& tensor) {
  if (!tensor.is_view()) return 1;
  return tensor.TensorBase::_base().use_count() == 1 ? 2 : 1;
}

void validate_storage(const FoundParam& param, const ByStorage& by_storage, int64_t rank) {
  const auto& tensor = held_part(param.tensor);
  const auto [begin, end] = by_storage.equal_range(storage_of(tensor));
  for (auto other = begin; other != end; ++other) {
    TORCH_CHECK_VALUE(other->second.impl == param.tensor.unsafeGetTensorImpl(),
                      "fully_shard: parameter '", param.path, "' and ", other->second.name,
                      " share memory without being one tensor; register the same tensor twice to "
                      "tie them, or clone one (rank ",
                      rank, ")");
  }
  if (const auto* shared = OnDemandStorage::of(tensor.unsafeGetTensorImpl())) {
    TORCH_CHECK_VALUE(false, "fully_shard: parameter '", param.path, "' shares the memory of ",
                      "parameter '", shared->group().parameter_name(shared->index()),
                      "' of another unit without being one tensor; register the same tensor "
                      "twice to tie them, or clone one before sharding either (rank ",
                      rank, ")");
  }
  const bool in_graph = torch::autograd::impl::try_get_grad_accumulator(param.tensor) != nullptr;
  const auto handles =
      static_cast<int64_t>(tensor.unsafeGetTensorImpl()->unsafe_storage().use_count());
  TORCH_CHECK_VALUE(
      !in_graph && handles <= own_handles(tensor),
      "fully_shard: something else uses the memory of parameter '", param.path,
      "', and would go on with its old values: a graph that is still alive (a loss or an output "
      "of an earlier forward), a view that the model keeps (weight.t(), weight.detach()), or a "
      "parameter or buffer outside of this module. Release it first, or make the view anew in "
      "every forward (rank ",
      rank, ")");
}

}  // namespace

void validate_storages(const std::vector<torch::nn::Module*>& modules,
                       const std::vector<const FoundParam*>& fresh, int64_t rank) {
  const auto by_storage = registered_below(modules);
  for (const auto* param : fresh) {
    if (held_part(param->tensor).numel() > 0) validate_storage(*param, by_storage, rank);
  }
}

}  // namespace fsdp::internal
