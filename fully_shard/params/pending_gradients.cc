#include "fully_shard/params/pending_gradients.h"

#include "fully_shard/params/optimizer_tripwire.h"
#include "fully_shard/params/param_group.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal {
namespace {

// Without a graph. A gradient may alias a parameter (w.backward(v.detach())), whose
// memory is on demand: then a copy, by an operator.
at::Tensor owned(const at::Tensor& gradient) {
  const auto detached = gradient.requires_grad() ? gradient.detach() : gradient;
  const bool on_demand = OnDemandStorage::behind(gradient) != nullptr;
  return on_demand ? detached.clone() : detached;
}

// Undefined for none, and for a tripwire.
at::Tensor gradient_on(const at::Tensor& member) {
  if (!member.defined() || !member.grad().defined()) return {};
  return is_untouched_tripwire(member.grad()) ? at::Tensor() : member.grad();
}

}  // namespace

PendingGradients::PendingGradients(ParamGroup& group, std::vector<ShardedParam>& params,
                                   GroupAccounts accounts)
    : group_(group),
      params_(params),
      accounts_(std::move(accounts)),
      sums_(params.size()),
      bytes_(params.size(), 0) {}

PendingGradients::~PendingGradients() {
  for (const auto bytes : bytes_) accounts_.add(&Counters::gradient_bytes, -bytes);
}

void PendingGradients::count(int64_t index) {
  const auto on_member = gradient_on(param(index).member());
  const auto& sum = sums_[static_cast<size_t>(index)];
  int64_t bytes = sum.defined() ? static_cast<int64_t>(held_part(sum).nbytes()) : 0;
  // Those of another layout are refused, and have no size.
  if (on_member.defined() && on_member.layout() == at::kStrided)
    bytes += static_cast<int64_t>(held_part(on_member).nbytes());
  set_counted(index, bytes);
}

void PendingGradients::set_counted(int64_t index, int64_t bytes) {
  const auto before = std::exchange(bytes_[static_cast<size_t>(index)], bytes);
  if (bytes != before) accounts_.add(&Counters::gradient_bytes, bytes - before);
}

bool PendingGradients::waits(int64_t index) const {
  return sums_[static_cast<size_t>(index)].defined() ||
         gradient_on(params_[static_cast<size_t>(index)].member()).defined();
}

void PendingGradients::keep(int64_t index, at::ScalarType dtype) {
  const auto on_member = gradient_on(param(index).member());
  if (on_member.defined() && on_member.scalar_type() != dtype) {
    const auto gradient = take_from_member(index);
    auto& sum = sums_[static_cast<size_t>(index)];
    if (sum.defined()) {
      sum.add_(gradient);
    } else {
      sum = gradient.to(dtype);
    }
  }
  count(index);
}

at::Tensor PendingGradients::take(int64_t index) {
  const auto gradient = take_from_member(index);
  auto sum = std::exchange(sums_[static_cast<size_t>(index)], {});
  set_counted(index, 0);
  if (!sum.defined()) return gradient;
  if (gradient.defined()) sum.add_(gradient);
  return sum;
}

at::Tensor PendingGradients::take_from_member(int64_t index) {
  const auto gradient = param(index).take_gradient(group_, index);
  if (!gradient.defined()) return {};
  has_left_tripwires_ = true;
  check_layout(gradient, index);
  return owned(gradient);
}

void PendingGradients::remove_tripwires() {
  if (!std::exchange(has_left_tripwires_, false)) return;
  for (auto& param : params_) param.remove_tripwire();
}

void PendingGradients::check_layout(const at::Tensor& gradient, int64_t index) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      gradient.layout() == at::kStrided, "parameter '", group_.parameter_name(index),
      "' has a gradient of layout ", gradient.layout(),
      "; sharded parameters take strided gradients only (use sparse=false; rank ",
      group_.dim().global_rank(), ")");
}

void PendingGradients::drop(int64_t index) {
  param(index).drop_gradient();
  sums_[static_cast<size_t>(index)].reset();
  set_counted(index, 0);
}

}  // namespace fsdp::internal
