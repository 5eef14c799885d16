#include "fully_shard/params/group_gradients.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/home_placement.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/entry_gradient.h"
#include "fully_shard/params/param_group.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

// As tensor.to(...), which costs the dispatcher where there is nothing to do.
at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}
bool is_replicated(const ShardedParam& param) {
  const auto& member = param.member_spec();
  return member && member->placements()[0].is_replicate() && member->mesh().size() > 1;
}

bool is_whole_everywhere(const DTensorSpec& spec) {
  for (int64_t dim = 0; dim < spec.mesh().ndim(); ++dim) {
    const bool is_whole = spec.placements()[static_cast<size_t>(dim)].is_replicate();
    if (!is_whole && spec.mesh().size(dim) > 1) return false;
  }
  return true;
}

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  return tensor.device() == device ? tensor : tensor.to(device);
}

}  // namespace

GroupGradients::GroupGradients(ParamGroup& group, std::vector<ShardedParam>& params,
                               GroupAccounts accounts)
    : group_(group),
      params_(params),
      accounts_(std::move(accounts)),
      unsynchronized_(params.size(), false),
      pending_(group, params, accounts_),
      shard_sums_(params.size()),
      has_replicated_members_(std::any_of(params.begin(), params.end(), is_replicated)) {}

GroupGradients::~GroupGradients() {
  drop();
  for (size_t i = 0; i < params_.size(); ++i) forget_shard_sum(static_cast<int64_t>(i));
}

double GroupGradients::divisor() const {
  const auto copies = group_.replicas() == nullptr ? 1 : group_.replicas()->shard_count();
  const auto ranks = static_cast<double>(group_.dim().shard_count() * copies);
  return group_.unit().policy.gradient_divide_factor.value_or(ranks);
}

bool GroupGradients::publishes_unused() const {
  return hook_ || group_.unit().policy.reduce_unused_params;
}

void GroupGradients::run_hook(const GradientBuffer& buffer, const at::Tensor& row) const {
  if (hook_) hook_(buffer.elements(row));
}

bool GroupGradients::stays_here() const {
  return group_.is_alone() && !hook_ && !has_replicated_members_;
}

at::ScalarType GroupGradients::reduce_dtype(int64_t index) const {
  const auto own = params_[static_cast<size_t>(index)].member_dtype();
  return at::isFloatingType(own) ? reduce_dtype_.value_or(own) : own;
}

bool GroupGradients::synchronizes() const { return group_.unit().policy.synchronize_gradients; }

bool GroupGradients::is_reduced(size_t index) {
  const bool owes = unsynchronized_[index] || shard_sums_[index].defined();
  return owes || params_[index].is_trainable();
}

bool GroupGradients::reduces_any() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (is_reduced(i)) return true;
  }
  return false;
}

std::vector<int64_t> GroupGradients::reduced_params() {
  std::vector<int64_t> indices;
  indices.reserve(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (is_reduced(i)) indices.push_back(static_cast<int64_t>(i));
  }
  return indices;
}

bool GroupGradients::reduces() { return synchronizes() && reduces_any(); }

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

void GroupGradients::open() {
  if (!buffers_.empty() || !synchronizes() || stays_here()) return;
  std::vector<at::ScalarType> dtypes;
  const auto indices = reduced_params();
  for (const auto index : indices) {
    const auto dtype = reduce_dtype(index);
    if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) dtypes.push_back(dtype);
  }
  for (const auto dtype : dtypes) {
    std::vector<TrainableParam> members;
    members.reserve(indices.size());
    for (const auto index : indices) {
      if (reduce_dtype(index) == dtype) {
        const auto& each = param(index);
        members.push_back({index, each.extent(dtype), group_.shards().shape(index, each)});
      }
    }
    buffers_.emplace_back(std::move(members), dtype, group_.dim().transport(), group_.device());
    accounts_.add(&Counters::gradient_bytes, buffers_.back().nbytes());
  }
}

void GroupGradients::receive(int64_t index) {
  const auto member = param(index).member();
  if (param(index).member_spec() || !member.defined() || !is_dtensor(member.grad())) return;
  const auto& spec = spec_of(member.grad());
  TORCH_CHECK_VALUE(is_whole_everywhere(spec), "the gradient of parameter '", param(index).name(),
                    "' came as a DTensor of ", to_string(spec),
                    ": a plain tensor that was computed from it met a DTensor, and what other "
                    "ranks have of its gradient would be lost. Let the parameter itself meet the "
                    "DTensor, or compute with the DTensor's full_tensor() (collective; rank ",
                    group_.dim().global_rank(), ")");
  member.mutable_grad() = local_of(member.grad());
}

void GroupGradients::pack(int64_t index) {
  const auto gradient = pending_.take(index);
  if (!gradient.defined()) return;
  const auto& home = param(index).member_spec();
  if (!home) return pack_whole(index, gradient);
  if (is_sum_of_terms(gradient, *home)) return keep_terms(index, gradient);
  pack_whole(index, local_at_home(gradient, *home));
}

void GroupGradients::pack_whole(int64_t index, const at::Tensor& gradient) {
  if (stays_here()) return publish_here(index, gradient);
  open();
  for (auto& buffer : buffers_) {
    const auto position = buffer.position(index);
    if (position >= 0) buffer.add(position, in_dtype(gradient, buffer.dtype()));
  }
}

void GroupGradients::keep_terms(int64_t index, const at::Tensor& gradient) {
  open();
  const auto own = in_dtype(local_of(gradient), reduce_dtype(index));
  for (auto& each : terms_) {
    if (each.index == index) return void(local_of(each.gradient).add_(own));
  }
  accounts_.add(&Counters::gradient_bytes, static_cast<int64_t>(own.nbytes()));
  terms_.push_back({index, make_dtensor(own, spec_of(gradient))});
}

bool GroupGradients::has_terms(int64_t index) const {
  return std::any_of(terms_.begin(), terms_.end(),
                     [index](const Terms& each) { return each.index == index; });
}

void GroupGradients::pack_terms() {
  std::vector<at::Tensor> gradients;
  for (const auto& each : terms_) gradients.push_back(each.gradient);
  const auto sums = sum_terms(gradients);
  for (size_t i = 0; i < terms_.size(); ++i) pack_whole(terms_[i].index, sums[i]);
  drop_terms();
}

void GroupGradients::drop_terms() {
  for (const auto& [index, gradient] : std::exchange(terms_, {})) {
    accounts_.add(&Counters::gradient_bytes, -static_cast<int64_t>(local_of(gradient).nbytes()));
  }
}

// As a reduction over one rank would.
void GroupGradients::publish_here(int64_t index, const at::Tensor& gradient) {
  const auto sum = in_dtype(gradient, reduce_dtype(index));
  const auto mean = divisor() != 1 ? sum.div(divisor()) : sum;
  publish(index, on_device(mean, group_.shards().device()));
}

void GroupGradients::publish_zeros_here() {
  for (const auto index : reduced_params()) {
    const auto entry = param(index).entry();
    if (!entry.defined() || entry.grad().defined()) continue;
    const auto options =
        at::TensorOptions().dtype(param(index).dtype()).device(group_.shards().device());
    publish(index, at::zeros(param(index).shape(), options));
  }
}

bool GroupGradients::complete() {
  if (!synchronizes()) return true;
  if (buffers_.empty()) return !reduces_any();
  return std::all_of(buffers_.begin(), buffers_.end(), [this](const auto& buffer) {
    return buffer.complete_but_for([this](int64_t index) { return has_terms(index); });
  });
}

void GroupGradients::collect_pending() {
  if (!synchronizes()) return;
  for (size_t i = 0; i < params_.size(); ++i) pack(static_cast<int64_t>(i));
  pack_terms();
  if (stays_here() && publishes_unused()) publish_zeros_here();
  unsynchronized_.assign(params_.size(), false);
}

void GroupGradients::drop_pending() {
  unsynchronized_.assign(params_.size(), false);
  for (size_t i = 0; i < params_.size(); ++i) {
    pending_.drop(static_cast<int64_t>(i));
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
  add_to_entry_gradient(param(index), in_dtype(part, param(index).dtype()),
                        group_.dim().global_rank());
}

}  // namespace fsdp::internal
