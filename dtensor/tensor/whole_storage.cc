#include "dtensor/tensor/whole_storage.h"

#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace fsdp::internal {
namespace {

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

const c10::Storage* whole_storage(const at::Tensor& dtensor, ShownStorage& shown) {
  if (!this_rank_has_all(dtensor)) return nullptr;
  const c10::NoGradGuard no_grad;
  tell_read(dtensor);
  return is_shown(dtensor, shown) ? &shown.storage : show(dtensor, local_of(dtensor), shown);
}

}  // namespace fsdp::internal
