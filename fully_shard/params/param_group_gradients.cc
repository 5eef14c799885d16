// A ParamGroup's gradients: from autograd's hook into the rows of a reduction, and from a
// reduced row into the registry.
#include "fully_shard/params/optimizer_tripwire.h"
#include "fully_shard/params/param_group.h"
#include "fully_shard/units/unit.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

// A gradient may alias a parameter (w.backward(v.detach())), whose memory is on demand:
// then a copy, by an operator.
at::Tensor owned(const at::Tensor& gradient) {
  return OnDemandStorage::of(gradient.unsafeGetTensorImpl()) == nullptr ? gradient
                                                                        : gradient.clone();
}

}  // namespace

double ParamGroup::divisor() const {
  return unit_->gradient_divide_factor.value_or(static_cast<double>(context_->world()));
}

// By the registry entry, which the user freezes and unfreezes; by the member where the
// entry died.
bool ParamGroup::is_trainable(const ManagedParam& param) {
  const auto entry = param.entry.lock();
  const auto deciding = entry ? entry : param.member.lock();
  return deciding && deciding->requires_grad();
}

std::vector<int64_t> ParamGroup::reduced_params() const {
  std::vector<int64_t> indices;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].unsynchronized || is_trainable(params_[i]))
      indices.push_back(static_cast<int64_t>(i));
  }
  return indices;
}

bool ParamGroup::reduces() const {
  return unit_->synchronize_gradients && !reduced_params().empty();
}

void ParamGroup::keep_unsynchronized() {
  if (unit_->synchronize_gradients) return;
  for (auto& param : params_) param.unsynchronized |= is_trainable(param);
}

void ParamGroup::open_buffers() {
  if (!gradients_.empty() || !unit_->synchronize_gradients || context_->world() == 1) return;
  std::vector<at::ScalarType> dtypes;
  const auto indices = reduced_params();
  for (const auto index : indices) {
    const auto dtype = params_[static_cast<size_t>(index)].dtype;
    if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) dtypes.push_back(dtype);
  }
  for (const auto dtype : dtypes) {
    std::vector<TrainableParam> members;
    for (const auto index : indices) {
      const auto& param = params_[static_cast<size_t>(index)];
      if (param.dtype != dtype) continue;
      const auto rows = param.spec->shape.front();
      members.push_back({index, {rows, rows == 0 ? 0 : layout_->chunk(index).total_bytes / rows}});
    }
    gradients_.emplace_back(std::move(members), dtype, context_->world(), shards_.device());
    context_->account(&Counters::gradient_bytes, gradients_.back().nbytes());
  }
}

void ParamGroup::gradient_arrived(int64_t index) {
  c10::InferenceMode no_inference(false);
  c10::NoGradGuard no_grad;
  const ExclusiveUse use(context_->user());
  // Takes part, synchronised or not: else its touch in this forward would stand in the
  // next backward's order.
  auto& pass = context_->backward();
  pass.note_backward(*this);
  if (!unit_->synchronize_gradients) return;  // stays on the member
  if (notes_.sent && context_->world() > 1) return pass.note_late();
  pack(index);
  if (context_->world() > 1) pass.send_ready();
}

// What autograd left on the member; undefined for nothing.
at::Tensor ParamGroup::take_gradient(int64_t index) {
  auto& param = params_[static_cast<size_t>(index)];
  const auto member = param.lock_member();
  if (!member.defined() || !member.grad().defined() || is_tripwire(member.grad())) return {};
  if (!param.tripwire.defined()) param.tripwire = make_tripwire(member, *this, index);
  return std::exchange(member.mutable_grad(), param.tripwire);
}

void ParamGroup::pack(int64_t index) {
  auto gradient = take_gradient(index);
  if (!gradient.defined()) return;
  const auto& param = params_[static_cast<size_t>(index)];
  TORCH_CHECK_NOT_IMPLEMENTED(
      gradient.layout() == at::kStrided, "parameter '", param.name, "' has a gradient of layout ",
      gradient.layout(),
      "; sharded parameters take strided gradients only (use sparse=false; rank ", context_->rank(),
      ")");
  if (context_->world() == 1) {  // nothing to reduce
    gradient = owned(gradient.detach());
    return accumulate_gradient(index, divisor() != 1 ? gradient.div(divisor()) : gradient);
  }
  gradient = owned(std::move(gradient));
  open_buffers();
  for (auto& buffer : gradients_) {
    const auto position = buffer.position(index);
    if (position >= 0) buffer.add(position, gradient);
  }
}

bool ParamGroup::gradients_complete() const {
  if (!unit_->synchronize_gradients) return true;
  if (gradients_.empty()) return reduced_params().empty();
  return std::all_of(gradients_.begin(), gradients_.end(),
                     [](const auto& buffer) { return buffer.complete(); });
}

void ParamGroup::collect_pending() {
  if (!unit_->synchronize_gradients) return;
  for (size_t i = 0; i < params_.size(); ++i) pack(static_cast<int64_t>(i));
  for (auto& param : params_) param.unsynchronized = false;
}

void ParamGroup::drop_pending() {
  for (auto& param : params_) {
    param.unsynchronized = false;
    auto member = param.lock_member();
    if (member.defined()) member.mutable_grad().reset();
  }
}

std::vector<GradientBuffer> ParamGroup::take_gradients() {
  for (const auto& buffer : gradients_)
    context_->account(&Counters::gradient_bytes, -buffer.nbytes());
  return std::exchange(gradients_, {});
}

void ParamGroup::drop_gradients() { take_gradients(); }

void ParamGroup::accumulate_gradient(int64_t index, const at::Tensor& part) {
  auto& param = params_[static_cast<size_t>(index)];
  auto entry = param.lock_entry();
  if (!entry.defined()) return;  // its module is gone; the reduction was issued all the same
  auto local = part.view(local_of(entry).sizes());
  if (entry.grad().defined()) {
    local_of(entry.grad()).add_(local);
  } else {
    entry.mutable_grad() = make_dtensor(local, param.spec);
  }
}

}  // namespace fsdp::internal
