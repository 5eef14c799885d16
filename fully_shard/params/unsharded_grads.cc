#include "fully_shard/params/unsharded_grads.h"

#include "fully_shard/params/optimizer_tripwire.h"
#include "on_demand/on_demand_storage.h"

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

UnshardedGrads::UnshardedGrads(const GroupInfo& info, std::vector<FSDPParam>& params,
                               std::weak_ptr<ShardWrites> writes)
    : info_(info),
      params_(params),
      writes_(std::move(writes)),
      sums_(params.size()),
      bytes_(params.size(), 0) {}

UnshardedGrads::~UnshardedGrads() {
  for (const auto bytes : bytes_) info_.accounts().add(&Counters::gradient_bytes, -bytes);
}

void UnshardedGrads::count(int64_t index) {
  const auto on_member = gradient_on(param(index).member());
  const auto& sum = sums_[static_cast<size_t>(index)];
  int64_t bytes = sum.defined() ? static_cast<int64_t>(held_part(sum).nbytes()) : 0;
  // Those of another layout are refused, and have no size.
  if (on_member.defined() && on_member.layout() == at::kStrided)
    bytes += static_cast<int64_t>(held_part(on_member).nbytes());
  set_counted(index, bytes);
}

void UnshardedGrads::set_counted(int64_t index, int64_t bytes) {
  const auto before = std::exchange(bytes_[static_cast<size_t>(index)], bytes);
  if (bytes != before) info_.accounts().add(&Counters::gradient_bytes, bytes - before);
}

bool UnshardedGrads::waits(int64_t index) const {
  return sums_[static_cast<size_t>(index)].defined() ||
         gradient_on(params_[static_cast<size_t>(index)].member()).defined();
}

void UnshardedGrads::keep(int64_t index, at::ScalarType dtype) {
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

at::Tensor UnshardedGrads::take(int64_t index) {
  const auto gradient = take_from_member(index);
  auto sum = std::exchange(sums_[static_cast<size_t>(index)], {});
  set_counted(index, 0);
  if (!sum.defined()) return gradient;
  if (gradient.defined()) sum.add_(gradient);
  return sum;
}

at::Tensor UnshardedGrads::take_from_member(int64_t index) {
  const auto gradient = param(index).take_gradient(writes_);
  if (!gradient.defined()) return {};
  has_left_tripwires_ = true;
  check_layout(gradient, index);
  return owned(gradient);
}

void UnshardedGrads::remove_tripwires() {
  if (!std::exchange(has_left_tripwires_, false)) return;
  for (auto& param : params_) param.remove_tripwire();
}

void UnshardedGrads::check_layout(const at::Tensor& gradient, int64_t index) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      gradient.layout() == at::kStrided, "parameter '", params_[static_cast<size_t>(index)].name(),
      "' has a gradient of layout ", gradient.layout(),
      "; sharded parameters take strided gradients only (use sparse=false; rank ", info_.rank(),
      ")");
}

void UnshardedGrads::drop(int64_t index) {
  param(index).drop_gradient();
  sums_[static_cast<size_t>(index)].reset();
  set_counted(index, 0);
}

}  // namespace fsdp::internal
