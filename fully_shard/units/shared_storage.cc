#include "fully_shard/units/shared_storage.h"

#include "dtensor/internal/dtensor_impl.h"
#include "fully_shard/units/module_tree.h"
#include "on_demand/on_demand_storage.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace fsdp::internal {
namespace {

// A registered tensor, once for each name, and what it is called.
struct Registered {
  at::Tensor tensor;
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
    found.emplace(storage_of(held_part(tensor)), Registered{tensor, kind + (" '" + path + "'")});
  };
  for (size_t i = 0; i < tree.size(); ++i) {
    for (const auto& slot : slots_of(tree.module(i)))
      add(registered(slot), "parameter", tree.path_of(i, slot.key));
    for (const auto& item : tree.module(i).named_buffers(/*recurse=*/false))
      add(item.value(), "buffer", tree.path_of(i, item.key()));
  }
  return found;
}

// The elements of its storage from the first that a tensor has to the last.
struct ElementRange {
  explicit ElementRange(const at::Tensor& tensor)
      : begin(tensor.storage_offset() * tensor.element_size()), end(begin) {
    if (tensor.numel() == 0) return;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
      end += (tensor.size(dim) - 1) * tensor.stride(dim) * tensor.element_size();
    end += tensor.element_size();
  }
  bool overlaps(const ElementRange& other) const { return begin < other.end && other.begin < end; }

  int64_t begin, end;  // bytes
};

// The handles of a storage that these tensors account for: theirs, and those of the
// tensors that they are views of, where nobody else has that any more.
class KnownHandles {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensors_.insert(tensor.unsafeGetTensorImpl()).second || !tensor.is_view()) return;
    ++views_[&tensor.TensorBase::_base()];
  }
  int64_t count() const {
    const auto bases = std::count_if(views_.begin(), views_.end(), [](const auto& item) {
      return static_cast<int64_t>(item.first->use_count()) == item.second;
    });
    return static_cast<int64_t>(tensors_.size()) + bases;
  }

 private:
  struct SameTensor {
    bool operator()(const at::TensorBase* a, const at::TensorBase* b) const {
      return a->unsafeGetTensorImpl() < b->unsafeGetTensorImpl();
    }
  };
  std::set<const c10::TensorImpl*> tensors_;
  std::map<const at::TensorBase*, int64_t, SameTensor> views_;  // by base: views of it
};

// Disjoint slices of one storage share nothing that matters: each becomes shards of its
// own. (cuDNN's weights of an RNN lie so, and those of loaders that read one file.)
void validate_storage(const FoundParam& param, const ByStorage& by_storage, int64_t rank) {
  const auto& tensor = held_part(param.tensor);
  const ElementRange own(tensor);
  const auto [begin, end] = by_storage.equal_range(storage_of(tensor));
  KnownHandles known;
  for (auto other = begin; other != end; ++other) {
    const auto& registered = other->second.tensor;
    known.add(held_part(registered));
    TORCH_CHECK_VALUE(
        registered.is_same(param.tensor) || !own.overlaps(ElementRange(held_part(registered))),
        "fully_shard: parameter '", param.path, "' and ", other->second.name,
        " share memory without being one tensor; register the same tensor twice to tie them, or "
        "clone one (rank ",
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
      !in_graph && handles <= known.count(),
      "fully_shard: something else uses the memory of parameter '", param.path,
      "', and would go on with its old values: a graph that is still alive (a loss or an output "
      "of an earlier forward), a view that the model keeps (weight.t(), weight.detach()), or a "
      "parameter or buffer outside of this module. Release it first, or make the view anew in "
      "every forward; where a loader gave all parameters slices of one tensor, give each memory "
      "of its own first, parameter.set_data(parameter.clone()) (rank ",
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
