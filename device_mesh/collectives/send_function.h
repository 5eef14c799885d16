// What moves the bytes of a collective in the backend's place (fsdp::Communicate).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>

namespace c10d {
class Work;
}

namespace fsdp::internal {

// From `input` into `output`, both flat; finished when the work is, null for at once.
using SendFunction = std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& output,
                                                                  const at::Tensor& input)>;

}  // namespace fsdp::internal
