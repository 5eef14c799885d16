#include "checkpoint/ranks/tensor_values.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/core/GradMode.h>

#include <algorithm>

namespace fsdp::internal::checkpoint {
namespace {

bool every_rank_has_all(const at::Tensor& dtensor) {
  const auto& spec = spec_of(dtensor);
  return spec.mesh().size() == 1 ||
         std::all_of(spec.placements().begin(), spec.placements().end(),
                     [](const Placement& placement) { return placement.is_replicate(); });
}

}  // namespace

at::Tensor whole_value(const at::Tensor& tensor, const World& world) {
  const c10::NoGradGuard no_grad;
  if (is_dtensor(tensor)) {
    if (every_rank_has_all(tensor)) return local_value(tensor);
    return DTensor(tensor.detach()).full_tensor();
  }
  if (!world.group || world.size == 1) return tensor.detach();
  at::Tensor value = tensor.detach().clone(c10::MemoryFormat::Contiguous);
  world.collectives(value.device().type())
      .broadcast({.tensor = value, .what = "save: values of rank 0"});
  return value;
}

at::Tensor local_value(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return tensor.detach();
  tell_read(tensor);
  return local_of(tensor).detach();
}

at::Tensor open_for_writing(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return tensor.detach();
  tell_write(tensor);
  return local_of(tensor).detach();
}

void close_after_writing(const at::Tensor& tensor) { tell_written(tensor); }

}  // namespace fsdp::internal::checkpoint
