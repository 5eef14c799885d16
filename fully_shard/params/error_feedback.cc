#include "fully_shard/params/error_feedback.h"

#include <ATen/ops/zeros.h>

#include <utility>

namespace fsdp::internal {

ErrorFeedback::~ErrorFeedback() {
  for (const auto& each : kept_) count(-static_cast<int64_t>(each.values.nbytes()));
}

at::Tensor ErrorFeedback::take(at::ScalarType dtype, const std::vector<int64_t>& params) {
  at::Tensor taken;
  std::erase_if(kept_, [&](const Left& each) {
    if (each.dtype != dtype) return false;
    count(-static_cast<int64_t>(each.values.nbytes()));
    if (each.params == params) taken = taken.defined() ? taken.add_(each.values) : each.values;
    return true;
  });
  return taken;
}

void ErrorFeedback::keep(at::ScalarType dtype, const std::vector<int64_t>& params,
                         at::Tensor left) {
  if (!left.defined()) return;
  count(static_cast<int64_t>(left.nbytes()));
  kept_.push_back({dtype, params, std::move(left)});
}

Remainder::Remainder(const std::shared_ptr<ErrorFeedback>& feedback, at::ScalarType dtype,
                     std::vector<int64_t> params, c10::IntArrayRef shape, const at::Tensor& like)
    : feedback_(feedback), dtype_(dtype), params_(std::move(params)) {
  left_ = feedback->take(dtype_, params_);
  values_ = left_.defined() ? left_.clone() : at::zeros(shape, like.options());
  bytes_ = static_cast<int64_t>(values_.nbytes() + (left_.defined() ? left_.nbytes() : 0));
  feedback->count(bytes_);
}

Remainder::~Remainder() {
  const auto feedback = feedback_.lock();
  if (!feedback) return;  // the group is gone
  feedback->count(-bytes_);
  feedback->keep(dtype_, params_, std::move(left_));
}

}  // namespace fsdp::internal
