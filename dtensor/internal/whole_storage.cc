#include "dtensor/internal/whole_storage.h"

#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <unordered_map>

namespace fsdp::internal {
namespace {

struct Gathered {
  at::Tensor dtensor;  // keeps its address from becoming another's
  ShownStorage shown;
};

// What the open WholeStorages of a thread show.
struct Shown {
  int scopes = 0;
  std::unordered_map<const c10::TensorImpl*, Gathered> gathered = {};
};

Shown& shown_here() {
  thread_local Shown shown;
  return shown;
}

bool this_rank_has_all(const at::Tensor& dtensor) {
  const auto& spec = spec_of(dtensor);
  const auto& placements = spec.placements();
  return spec.mesh().size() == 1 ||
         std::all_of(placements.begin(), placements.end(),
                     [](const Placement& placement) { return placement.is_replicate(); });
}

void let_go(void* value) { delete static_cast<at::Tensor*>(value); }

// Of the memory of `value`, which lies as `dtensor` says, and of nothing beside it:
// torch's files hold storages whole.
c10::Storage storage_of(const at::Tensor& value, const at::Tensor& dtensor) {
  const size_t bytes =
      at::detail::computeStorageNbytes(dtensor.sizes(), dtensor.strides(), value.element_size());
  void* const data = const_cast<void*>(value.const_data_ptr());  // NOLINT: it shares memory
  c10::DataPtr memory(data, new at::Tensor(value), let_go, value.device());
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                      /*allocator=*/nullptr, /*resizable=*/false);
}

bool is_shown(const at::Tensor& dtensor, const ShownStorage& shown) {
  return shown.storage && shown.data == local_of(dtensor).const_data_ptr() &&
         shown.version == local_version_of(dtensor);
}

// Puts the storage of `whole`, the value of `dtensor`, into `shown`.
const c10::Storage* show(const at::Tensor& dtensor, const at::Tensor& whole, ShownStorage& shown) {
  at::Tensor laid_out = whole.detach();
  if (whole.strides() != dtensor.strides() || whole.is_conj() || whole.is_neg()) {
    laid_out = at::empty_strided(dtensor.sizes(), dtensor.strides(), whole.options());
    laid_out.copy_(whole);
  }
  shown = {local_of(dtensor).const_data_ptr(), local_version_of(dtensor),
           storage_of(laid_out, dtensor)};
  return &shown.storage;
}

}  // namespace

WholeStorages::WholeStorages() { ++shown_here().scopes; }

WholeStorages::~WholeStorages() {
  if (--shown_here().scopes == 0) shown_here().gathered.clear();
}

const c10::Storage* whole_storage(const at::Tensor& dtensor, ShownStorage& shown) {
  const bool has_all = this_rank_has_all(dtensor);
  if (!has_all && shown_here().scopes == 0) return nullptr;
  const c10::NoGradGuard no_grad;
  tell_read(dtensor);
  if (has_all) {
    return is_shown(dtensor, shown) ? &shown.storage : show(dtensor, local_of(dtensor), shown);
  }
  auto& gathered = shown_here().gathered[dtensor.unsafeGetTensorImpl()];
  gathered.dtensor = dtensor;
  if (is_shown(dtensor, gathered.shown)) return &gathered.shown.storage;
  return show(dtensor, whole_value(dtensor), gathered.shown);
}

}  // namespace fsdp::internal
