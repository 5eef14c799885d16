#include "fully_shard/params/accumulated_grads.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/home_placement.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/entry_gradient.h"

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
bool is_replicated(const FSDPParam& param) {
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

AccumulatedGrads::AccumulatedGrads(const GroupInfo& info, std::vector<FSDPParam>& params,
                                   const ShardBuffer& shards, std::weak_ptr<ShardWrites> writes)
    : info_(info),
      params_(params),
      shards_(shards),
      unsynchronized_(params.size(), false),
      accumulated_(info, params, std::move(writes)),
      shard_sums_(params.size()),
      has_replicated_members_(std::any_of(params.begin(), params.end(), is_replicated)) {}

AccumulatedGrads::~AccumulatedGrads() {
  drop();
  for (size_t i = 0; i < params_.size(); ++i) forget_shard_sum(static_cast<int64_t>(i));
}

double AccumulatedGrads::divisor() const {
  const auto copies = info_.replicas() == nullptr ? 1 : info_.replicas()->shard_count();
  const auto ranks = static_cast<double>(info_.dim().shard_count() * copies);
  return info_.unit().policy.gradient_divide_factor.value_or(ranks);
}

bool AccumulatedGrads::publishes_unused() const {
  return hook_ || info_.unit().policy.reduce_unused_params;
}

void AccumulatedGrads::run_hook(const GradientBuffer& buffer, const at::Tensor& row) const {
  if (hook_) hook_(buffer.elements(row));
}

bool AccumulatedGrads::stays_here() const {
  return info_.is_alone() && !hook_ && !has_replicated_members_;
}

at::ScalarType AccumulatedGrads::reduce_dtype(int64_t index) const {
  const auto own = params_[static_cast<size_t>(index)].member_dtype();
  return at::isFloatingType(own) ? reduce_dtype_.value_or(own) : own;
}

bool AccumulatedGrads::synchronizes() const { return info_.unit().policy.synchronize_gradients; }

bool AccumulatedGrads::is_reduced(size_t index) {
  const bool owes = unsynchronized_[index] || shard_sums_[index].defined();
  return owes || params_[index].is_trainable();
}

bool AccumulatedGrads::reduces_any() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (is_reduced(i)) return true;
  }
  return false;
}

std::vector<int64_t> AccumulatedGrads::reduced_params() {
  std::vector<int64_t> indices;
  indices.reserve(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (is_reduced(i)) indices.push_back(static_cast<int64_t>(i));
  }
  return indices;
}

bool AccumulatedGrads::reduces() { return synchronizes() && reduces_any(); }

void AccumulatedGrads::keep_unsynchronized() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].is_trainable()) unsynchronized_[i] = true;
  }
}

bool AccumulatedGrads::keeps_gradients() const {
  return std::find(unsynchronized_.begin(), unsynchronized_.end(), true) != unsynchronized_.end() ||
         std::any_of(shard_sums_.begin(), shard_sums_.end(),
                     [](const auto& kept) { return kept.defined(); });
}

void AccumulatedGrads::open() {
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
        members.push_back({index, each.extent(dtype), shards_.shape(index, each)});
      }
    }
    buffers_.emplace_back(std::move(members), dtype, info_.dim().transport(),
                          shards_.member_device());
    info_.accounts().add(&Counters::gradient_bytes, buffers_.back().nbytes());
  }
}

void AccumulatedGrads::receive(int64_t index) {
  const auto member = param(index).member();
  if (param(index).member_spec() || !member.defined() || !is_dtensor(member.grad())) return;
  const auto& spec = spec_of(member.grad());
  TORCH_CHECK_VALUE(is_whole_everywhere(spec), "the gradient of parameter '", param(index).name(),
                    "' came as a DTensor of ", to_string(spec),
                    ": a plain tensor that was computed from it met a DTensor, and what other "
                    "ranks have of its gradient would be lost. Let the parameter itself meet the "
                    "DTensor, or compute with the DTensor's full_tensor() (collective; rank ",
                    info_.rank(), ")");
  member.mutable_grad() = local_of(member.grad());
}

void AccumulatedGrads::pack(int64_t index) {
  const auto gradient = accumulated_.take(index);
  if (!gradient.defined()) return;
  const auto& home = param(index).member_spec();
  if (!home) return pack_whole(index, gradient);
  if (is_sum_of_terms(gradient, *home)) return keep_terms(index, gradient);
  pack_whole(index, local_at_home(gradient, *home));
}

void AccumulatedGrads::pack_whole(int64_t index, const at::Tensor& gradient) {
  if (stays_here()) return publish_here(index, gradient);
  open();
  for (auto& buffer : buffers_) {
    const auto position = buffer.position(index);
    if (position >= 0) buffer.add(position, in_dtype(gradient, buffer.dtype()));
  }
}

void AccumulatedGrads::keep_terms(int64_t index, const at::Tensor& gradient) {
  open();
  const auto own = in_dtype(local_of(gradient), reduce_dtype(index));
  for (auto& each : terms_) {
    if (each.index == index) return void(local_of(each.gradient).add_(own));
  }
  info_.accounts().add(&Counters::gradient_bytes, static_cast<int64_t>(own.nbytes()));
  terms_.push_back({index, make_dtensor(own, spec_of(gradient))});
}

bool AccumulatedGrads::has_terms(int64_t index) const {
  return std::any_of(terms_.begin(), terms_.end(),
                     [index](const Terms& each) { return each.index == index; });
}

void AccumulatedGrads::pack_terms() {
  std::vector<at::Tensor> gradients;
  for (const auto& each : terms_) gradients.push_back(each.gradient);
  const auto sums = sum_terms(gradients);
  for (size_t i = 0; i < terms_.size(); ++i) pack_whole(terms_[i].index, sums[i]);
  drop_terms();
}

void AccumulatedGrads::drop_terms() {
  for (const auto& [index, gradient] : std::exchange(terms_, {})) {
    info_.accounts().add(&Counters::gradient_bytes,
                         -static_cast<int64_t>(local_of(gradient).nbytes()));
  }
}

// As a reduction over one rank would.
void AccumulatedGrads::publish_here(int64_t index, const at::Tensor& gradient) {
  const auto sum = in_dtype(gradient, reduce_dtype(index));
  const auto mean = divisor() != 1 ? sum.div(divisor()) : sum;
  publish(index, on_device(mean, shards_.device()));
}

void AccumulatedGrads::publish_zeros_here() {
  for (const auto index : reduced_params()) {
    const auto entry = param(index).entry();
    if (!entry.defined() || entry.grad().defined()) continue;
    const auto options = at::TensorOptions().dtype(param(index).dtype()).device(shards_.device());
    publish(index, at::zeros(param(index).shape(), options));
  }
}

bool AccumulatedGrads::complete() {
  if (!synchronizes()) return true;
  if (buffers_.empty()) return !reduces_any();
  return std::all_of(buffers_.begin(), buffers_.end(), [this](const auto& buffer) {
    return buffer.complete_but_for([this](int64_t index) { return has_terms(index); });
  });
}

void AccumulatedGrads::pack_accumulated() {
  if (!synchronizes()) return;
  for (size_t i = 0; i < params_.size(); ++i) pack(static_cast<int64_t>(i));
  pack_terms();
  if (stays_here() && publishes_unused()) publish_zeros_here();
  unsynchronized_.assign(params_.size(), false);
}

void AccumulatedGrads::drop_accumulated() {
  unsynchronized_.assign(params_.size(), false);
  for (size_t i = 0; i < params_.size(); ++i) {
    accumulated_.drop(static_cast<int64_t>(i));
    forget_shard_sum(static_cast<int64_t>(i));
  }
}

std::vector<GradientBuffer> AccumulatedGrads::take() {
  for (const auto& buffer : buffers_)
    info_.accounts().add(&Counters::gradient_bytes, -buffer.nbytes());
  return std::exchange(buffers_, {});
}

bool AccumulatedGrads::reduces_over_replicas() const {
  return info_.replicas() != nullptr && info_.unit().policy.all_reduce_gradients;
}

void AccumulatedGrads::keep_shard_sum(int64_t index, const at::Tensor& part) {
  auto& kept = shard_sums_[static_cast<size_t>(index)];
  if (kept.defined()) {
    kept.add_(part);
    return;
  }
  kept = part.clone();
  info_.accounts().add(&Counters::gradient_bytes, static_cast<int64_t>(kept.nbytes()));
}

void AccumulatedGrads::forget_shard_sum(int64_t index) {
  const auto kept = std::exchange(shard_sums_[static_cast<size_t>(index)], {});
  if (kept.defined())
    info_.accounts().add(&Counters::gradient_bytes, -static_cast<int64_t>(kept.nbytes()));
}

void AccumulatedGrads::add_shard_sums(const GradientBuffer& buffer, at::Tensor& row) {
  for (size_t i = 0; i < buffer.params().size(); ++i) {
    const auto index = buffer.params()[i].index;
    const auto& kept = shard_sums_[static_cast<size_t>(index)];
    if (!kept.defined()) continue;
    buffer.add_part(row, static_cast<int64_t>(i), kept);
    forget_shard_sum(index);
  }
}

void AccumulatedGrads::publish(int64_t index, const at::Tensor& part) {
  add_to_entry_gradient(param(index), in_dtype(part, param(index).dtype()), info_.rank());
}

}  // namespace fsdp::internal
