#include "checkpoint/ranks/tensor_values.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

namespace fsdp::internal::checkpoint {

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

std::string codec_of(const at::Tensor& tensor) {
  const auto* const owner = is_dtensor(tensor) ? owner_of(tensor) : nullptr;
  return owner == nullptr ? "" : owner->codec();
}

}  // namespace fsdp::internal::checkpoint
