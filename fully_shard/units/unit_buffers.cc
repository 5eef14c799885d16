#include "fully_shard/units/unit_buffers.h"

#include "device_mesh/internal/weak_registry.h"
#include "dtensor/dtensor.h"

#include <c10/core/GradMode.h>

namespace fsdp::internal {
namespace {

// Of a buffer that some unit casts. It has its own dtype again whenever it has another
// one than `cast` (Module::to).
struct DtypesOfBuffer {
  at::ScalarType own = at::ScalarType::Undefined, cast = own;
};

// Of the buffers of all units of the process.
auto& dtypes_of_buffers() {
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  static auto& instance = *new WeakKeyMap<WeakTensor, DtypesOfBuffer>();
  return instance;
}

void cast_buffer(const at::Tensor& buffer, std::optional<at::ScalarType> dtype) {
  if (buffer.is_meta()) return;
  const auto own = own_dtype(buffer);
  const auto becomes = dtype.value_or(own);
  if (buffer.scalar_type() != becomes) buffer.set_data(buffer.to(becomes));
  dtypes_of_buffers().with(buffer.getIntrusivePtr(), [&](DtypesOfBuffer& dtypes) {
    dtypes = {own, becomes};
  });
}

}  // namespace

at::ScalarType own_dtype(const at::Tensor& tensor) {
  const auto known = dtypes_of_buffers().find(tensor.getIntrusivePtr());
  return known && known->cast == tensor.scalar_type() ? known->own : tensor.scalar_type();
}

at::Tensor in_own_dtype(const at::Tensor& tensor) {
  const auto dtype = own_dtype(tensor);
  return tensor.scalar_type() == dtype ? tensor : tensor.detach().to(dtype);
}

void UnitBuffers::take(const std::vector<at::Tensor>& buffers) {
  for (const auto& buffer : buffers) {
    const auto dtype = buffer.scalar_type();
    if (!at::isFloatingType(dtype) || is_dtensor(buffer)) continue;
    dtypes_of_buffers().with(buffer.getIntrusivePtr(), [&](DtypesOfBuffer& dtypes) {
      if (dtypes.own != at::ScalarType::Undefined) return;  // a unit has it
      dtypes = {dtype, dtype};
      buffers_.emplace_back(buffer.getIntrusivePtr());
    });
  }
}

void UnitBuffers::cast(std::optional<at::ScalarType> dtype) const {
  const at::NoGradGuard no_grad;
  for (const auto& weak : buffers_) {
    const at::Tensor buffer(weak.lock());
    if (buffer.defined()) cast_buffer(buffer, dtype);
  }
}

}  // namespace fsdp::internal
