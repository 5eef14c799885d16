#include "fully_shard/units/shared_storage.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/units/module_tree.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace fsdp::internal {
namespace {

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

int64_t handles_of_storage(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.unsafeGetTensorImpl()->unsafe_storage().use_count());
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

// Of no unit and of no mesh, with values.
bool is_plain(const at::Tensor& tensor) {
  return !is_dtensor(tensor) && !tensor.is_meta() && tensor.numel() > 0 &&
         OnDemandStorage::behind(tensor) == nullptr;
}

void copy_apart(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) parameter.set_data(parameter.clone());
}

bool is_in_graph(const at::Tensor& tensor) {
  return torch::autograd::impl::try_get_grad_accumulator(tensor) != nullptr;
}

}  // namespace

// The registered tensors of one storage.
class StorageUsers::Users {
 public:
  void add(const at::Tensor& tensor, std::string name) {
    known_.add(held_part(tensor));
    if (held_part(tensor).numel() > 0)
      slices_.push_back({tensor, std::move(name), ElementRange(held_part(tensor))});
  }

  // REQUIRES: all were added.
  void sort() {
    std::stable_sort(slices_.begin(), slices_.end(), [](const auto& one, const auto& other) {
      return one.range.begin < other.range.begin;
    });
    int64_t reach = 0;
    for (const auto& slice : slices_) reaches_.push_back(reach = std::max(reach, slice.range.end));
  }

  int64_t known_handles() const { return known_.count(); }

  // What has elements of `tensor` without being the same tensor; null for nothing.
  const std::string* overlapping(const at::Tensor& tensor) const {
    const ElementRange own(held_part(tensor));
    const auto starts_before = [&own](const auto& slice) { return slice.range.begin < own.end; };
    auto i = std::partition_point(slices_.begin(), slices_.end(), starts_before) - slices_.begin();
    while (i-- > 0 && reaches_[static_cast<size_t>(i)] > own.begin) {
      const auto& slice = slices_[static_cast<size_t>(i)];
      if (!slice.tensor.is_same(tensor) && own.overlaps(slice.range)) return &slice.name;
    }
    return nullptr;
  }

 private:
  // A registered tensor, once for each name, and what it is called.
  struct Slice {
    at::Tensor tensor;
    std::string name;  // "parameter 'l0.weight'"
    ElementRange range;
  };
  std::vector<Slice> slices_;     // by where they begin
  std::vector<int64_t> reaches_;  // where the farthest of the slices up to each ends
  KnownHandles known_;
};

StorageUsers::StorageUsers(const std::vector<torch::nn::Module*>& modules) {
  const ModuleTree tree(modules);
  const auto add = [this](const at::Tensor& tensor, const char* kind, const std::string& path) {
    if (!tensor.defined() || !held_part(tensor).has_storage()) return;
    auto& users = by_storage_[storage_of(held_part(tensor))];
    if (users == nullptr) users = std::make_unique<Users>();
    users->add(tensor, kind + (" '" + path + "'"));
  };
  for (size_t i = 0; i < tree.size(); ++i) {
    for (const auto& slot : slots_of(tree.module(i)))
      add(registered(slot), "parameter", tree.path_of(i, slot.key));
    for (const auto& item : tree.module(i).named_buffers(/*recurse=*/false))
      add(item.value(), "buffer", tree.path_of(i, item.key()));
  }
  for (const auto& [storage, users] : by_storage_) users->sort();
}

StorageUsers::~StorageUsers() = default;

bool StorageUsers::are_all(const at::Tensor& tensor) const {
  const auto users = by_storage_.find(storage_of(held_part(tensor)));
  const auto known = users == by_storage_.end() ? 0 : users->second->known_handles();
  return handles_of_storage(held_part(tensor)) <= known;
}

// Disjoint slices of one storage share nothing that matters: each becomes shards of its
// own. (cuDNN's weights of an RNN lie so, and those of loaders that read one file.)
void StorageUsers::check_overlaps(const FoundParam& param, const ErrorContext& context) const {
  const auto users = by_storage_.find(storage_of(held_part(param.tensor)));
  const auto* const other =
      users == by_storage_.end() ? nullptr : users->second->overlapping(param.tensor);
  TORCH_CHECK_VALUE(
      other == nullptr, context.caller, ": parameter '", param.path, "' and ", *other,
      " share memory without being one tensor; register the same tensor twice to tie them, or "
      "clone one",
      context.rank);
}

void StorageUsers::check(const FoundParam& param, const ErrorContext& context) const {
  check_overlaps(param, context);
  if (const auto* shared = OnDemandStorage::behind(param.tensor)) {
    TORCH_CHECK_VALUE(false, context.caller, ": parameter '", param.path, "' shares the memory of ",
                      "parameter '", shared->parameter_name(),
                      "' of another unit without being one tensor; register the same tensor "
                      "twice to tie them, or clone one before sharding either",
                      context.rank);
  }
  TORCH_CHECK_VALUE(
      !is_in_graph(param.tensor) && are_all(param.tensor), context.caller,
      ": something else uses the memory of parameter '", param.path,
      "', and would go on with its old values: a graph that is still alive (a loss or an output "
      "of an earlier forward), a view that the model keeps (weight.t(), weight.detach()), or a "
      "parameter or buffer outside of this module. Release it first, or make the view anew in "
      "every forward; where a loader gave all parameters slices of one tensor, call "
      "fsdp::separate_storages(model) with the whole model first",
      context.rank);
}

void validate_storages(const StorageUsers& users, const std::vector<const FoundParam*>& fresh,
                       const ErrorContext& context) {
  for (const auto* param : fresh) {
    if (held_part(param->tensor).numel() > 0) users.check(*param, context);
  }
}

void separate_from_others(torch::nn::Module& module) {
  const StorageUsers users({&module});
  const auto managed = find_managed({&module}, {});
  std::vector<at::Tensor> sliced;
  for (const auto& param : managed.params) {
    if (is_plain(param.tensor) && !users.are_all(param.tensor)) sliced.push_back(param.tensor);
  }
  copy_apart(sliced);
}

void separate_slices(torch::nn::Module& module, const ErrorContext& context) {
  const StorageUsers users({&module});
  const auto managed = find_managed({&module}, {});
  std::vector<at::Tensor> sliced;
  for (const auto& param : managed.params) {
    if (!is_plain(param.tensor) || handles_of_storage(param.tensor) == 1) continue;
    users.check(param, context);
    sliced.push_back(param.tensor);
  }
  copy_apart(sliced);
}

}  // namespace fsdp::internal
