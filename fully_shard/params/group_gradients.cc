#include "fully_shard/params/group_gradients.h"

#include "fully_shard/params/entry_gradient.h"
#include "fully_shard/params/optimizer_tripwire.h"
#include "fully_shard/params/param_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

// Without a graph. A gradient may alias a parameter (w.backward(v.detach())), whose
// memory is on demand: then a copy, by an operator.
at::Tensor owned(const at::Tensor& gradient) {
  const auto detached = gradient.requires_grad() ? gradient.detach() : gradient;
  const bool on_demand = OnDemandStorage::of(gradient.unsafeGetTensorImpl()) != nullptr;
  return on_demand ? detached.clone() : detached;
}

}  // namespace

GroupGradients::GroupGradients(ParamGroup& group, std::vector<ShardedParam>& params,
                               GroupAccounts accounts)
    : group_(group),
      params_(params),
      accounts_(std::move(accounts)),
      unsynchronized_(params.size(), false),
      pending_bytes_(params.size(), 0),
      shard_sums_(params.size()) {}

GroupGradients::~GroupGradients() {
  drop();
  for (size_t i = 0; i < params_.size(); ++i) forget_shard_sum(static_cast<int64_t>(i));
  for (const auto bytes : pending_bytes_) accounts_.add(&Counters::gradient_bytes, -bytes);
}

double GroupGradients::divisor() const {
  const auto copies = group_.replicas() == nullptr ? 1 : group_.replicas()->shard_count();
  const auto ranks = static_cast<double>(group_.dim().shard_count() * copies);
  return group_.unit().policy.gradient_divide_factor.value_or(ranks);
}

bool GroupGradients::synchronizes() const { return group_.unit().policy.synchronize_gradients; }

std::vector<int64_t> GroupGradients::reduced_params() {
  std::vector<int64_t> indices;
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool owes = unsynchronized_[i] || shard_sums_[i].defined();
    if (params_[i].is_trainable() || owes) indices.push_back(static_cast<int64_t>(i));
  }
  return indices;
}

bool GroupGradients::reduces() { return synchronizes() && !reduced_params().empty(); }

void GroupGradients::keep_unsynchronized() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].is_trainable()) unsynchronized_[i] = true;
  }
}

bool GroupGradients::keeps_gradients() const {
  return std::find(unsynchronized_.begin(), unsynchronized_.end(), true) != unsynchronized_.end() ||
         std::any_of(shard_sums_.begin(), shard_sums_.end(),
                     [](const auto& kept) { return kept.defined(); });
}

void GroupGradients::note_pending(int64_t index) {
  const auto member = param(index).member();
  const bool waits =
      member.defined() && member.grad().defined() && !is_untouched_tripwire(member.grad());
  const bool strided = waits && member.grad().layout() == at::kStrided;  // others are refused
  const auto bytes = strided ? static_cast<int64_t>(member.grad().nbytes()) : 0;
  const auto before = std::exchange(pending_bytes_[static_cast<size_t>(index)], bytes);
  accounts_.add(&Counters::gradient_bytes, bytes - before);
}

void GroupGradients::open() {
  if (!buffers_.empty() || !synchronizes() || group_.is_alone()) return;
  std::vector<at::ScalarType> dtypes;
  const auto indices = reduced_params();
  for (const auto index : indices) {
    const auto dtype = param(index).dtype();
    if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) dtypes.push_back(dtype);
  }
  for (const auto dtype : dtypes) {
    std::vector<TrainableParam> members;
    for (const auto index : indices) {
      if (param(index).dtype() == dtype) {
        members.push_back({index, param(index).extent(dtype), param(index).spec()->shape});
      }
    }
    buffers_.emplace_back(std::move(members), dtype, group_.dim().transport(), group_.device());
    accounts_.add(&Counters::gradient_bytes, buffers_.back().nbytes());
  }
}

void GroupGradients::check_gradient(const at::Tensor& gradient, int64_t index) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      gradient.layout() == at::kStrided, "parameter '", group_.parameter_name(index),
      "' has a gradient of layout ", gradient.layout(),
      "; sharded parameters take strided gradients only (use sparse=false; rank ",
      group_.dim().global_rank(), ")");
}

void GroupGradients::pack(int64_t index) {
  auto gradient = param(index).take_gradient(group_, index);
  note_pending(index);
  if (!gradient.defined()) return;
  check_gradient(gradient, index);
  gradient = owned(gradient);
  if (group_.is_alone()) {  // nothing to reduce
    return publish(index, divisor() != 1 ? gradient.div(divisor()) : gradient);
  }
  open();
  for (auto& buffer : buffers_) {
    const auto position = buffer.position(index);
    if (position >= 0) buffer.add(position, gradient);
  }
}

bool GroupGradients::complete() {
  if (!synchronizes()) return true;
  if (buffers_.empty()) return reduced_params().empty();
  return std::all_of(buffers_.begin(), buffers_.end(),
                     [](const auto& buffer) { return buffer.complete(); });
}

void GroupGradients::collect_pending() {
  if (!synchronizes()) return;
  for (size_t i = 0; i < params_.size(); ++i) pack(static_cast<int64_t>(i));
  unsynchronized_.assign(params_.size(), false);
}

void GroupGradients::drop_pending() {
  unsynchronized_.assign(params_.size(), false);
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].drop_gradient();
    note_pending(static_cast<int64_t>(i));
    forget_shard_sum(static_cast<int64_t>(i));
  }
}

std::vector<GradientBuffer> GroupGradients::take() {
  for (const auto& buffer : buffers_) accounts_.add(&Counters::gradient_bytes, -buffer.nbytes());
  return std::exchange(buffers_, {});
}

bool GroupGradients::reduces_over_replicas() const {
  return group_.replicas() != nullptr && group_.unit().policy.all_reduce_gradients;
}

void GroupGradients::keep_shard_sum(int64_t index, const at::Tensor& part) {
  auto& kept = shard_sums_[static_cast<size_t>(index)];
  if (kept.defined()) {
    kept.add_(part);
    return;
  }
  kept = part.clone();
  accounts_.add(&Counters::gradient_bytes, static_cast<int64_t>(kept.nbytes()));
}

void GroupGradients::forget_shard_sum(int64_t index) {
  const auto kept = std::exchange(shard_sums_[static_cast<size_t>(index)], {});
  if (kept.defined())
    accounts_.add(&Counters::gradient_bytes, -static_cast<int64_t>(kept.nbytes()));
}

void GroupGradients::add_shard_sums(const GradientBuffer& buffer, at::Tensor& row) {
  for (size_t i = 0; i < buffer.params().size(); ++i) {
    const auto index = buffer.params()[i].index;
    const auto& kept = shard_sums_[static_cast<size_t>(index)];
    if (!kept.defined()) continue;
    buffer.add_part(row, static_cast<int64_t>(i), kept);
    forget_shard_sum(index);
  }
}

void GroupGradients::publish(int64_t index, const at::Tensor& part) {
  add_to_entry_gradient(param(index), part, group_.dim().global_rank());
}

}  // namespace fsdp::internal
