#include "fully_shard/train/tensor_lists.h"

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <optional>

namespace fsdp::internal {
namespace {

bool belong_together(const at::Tensor& a, const at::Tensor& b) {
  return a.device() == b.device() && a.scalar_type() == b.scalar_type();
}

at::Tensor norms_of(const std::vector<at::Tensor>& list, double p) {
  const bool is_half = at::isReducedFloatingType(list.front().scalar_type());
  const auto dtype = is_half ? std::optional(at::kFloat) : std::nullopt;
  return at::stack(at::_foreach_norm(list, p, dtype)).to(at::kDouble);
}

}  // namespace

void TensorLists::add(const at::Tensor& tensor) {
  const auto list = std::find_if(lists_.begin(), lists_.end(), [&](const auto& each) {
    return belong_together(each.front(), tensor);
  });
  if (list != lists_.end()) return list->push_back(tensor);
  lists_.push_back({tensor});
}

at::Tensor TensorLists::norms(double p) const {
  const auto device = lists_.front().front().device();
  std::vector<at::Tensor> all;
  for (const auto& list : lists_) all.push_back(norms_of(list, p).to(device));
  return all.size() == 1 ? all.front() : at::cat(all);
}

void TensorLists::multiply(const at::Tensor& factor) const {
  for (const auto& list : lists_) {
    at::_foreach_mul_(list, factor.to(list.front().device(), list.front().scalar_type()));
  }
}

}  // namespace fsdp::internal
