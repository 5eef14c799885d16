// Tensors on devices, in lists of one device and dtype: what is done with all of them is
// one launch for each list. Local.
//
//   TensorLists gradients;
//   for (const auto& gradient : all) gradients.add(gradient);
//   const auto norms = gradients.norms(2);   // double, [tensors]
//   gradients.multiply(factor);
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

class TensorLists {
 public:
  // REQUIRES: has elements, of which LibTorch's lists make an error in some norms.
  void add(const at::Tensor& tensor);
  bool empty() const { return lists_.empty(); }
  // Of each tensor, on the first one's device; of half precision in float, which does not
  // overflow. REQUIRES: not empty.
  at::Tensor norms(double p) const;
  // Each by `factor`, a number in a tensor, in its own dtype.
  void multiply(const at::Tensor& factor) const;

 private:
  std::vector<std::vector<at::Tensor>> lists_;
};

}  // namespace fsdp::internal
