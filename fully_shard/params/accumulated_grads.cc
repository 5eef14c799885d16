#include "fully_shard/params/accumulated_grads.h"

#include "device_mesh/collectives/operations.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/grad_placement.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/sharded_grad.h"
#include "fully_shard/transport/packed_copy.h"
#include "on_demand/on_demand_storage.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
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

bool is_whole_everywhere(const DTensorSpec& spec) {
  for (int64_t dim = 0; dim < spec.mesh().ndim(); ++dim) {
    const bool is_whole = spec.placements()[static_cast<size_t>(dim)].is_replicate();
    if (!is_whole && spec.mesh().size(dim) > 1) return false;
  }
  return true;
}

DeviceStream current_stream(const ShardBuffer& shards) {
  return DeviceStream::current(shards.member_device());
}

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  return tensor.device() == device ? tensor : tensor.to(device);
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

void TensorParallelTerms::keep(int64_t index, const at::Tensor& gradient, at::ScalarType dtype) {
  const auto own = in_dtype(local_of(gradient), dtype);
  for (auto& each : terms_) {
    if (each.index == index) return void(local_of(each.gradient).add_(own));
  }
  accounts_.add(&Counters::gradient_bytes, static_cast<int64_t>(own.nbytes()));
  terms_.push_back({index, make_dtensor(own, spec_of(gradient))});
}

bool TensorParallelTerms::has(int64_t index) const {
  return std::any_of(terms_.begin(), terms_.end(),
                     [index](const Term& each) { return each.index == index; });
}

std::vector<std::pair<int64_t, at::Tensor>> TensorParallelTerms::take_sums() {
  std::vector<at::Tensor> gradients;
  for (const auto& each : terms_) gradients.push_back(each.gradient);
  const auto sums = sum_terms(gradients);
  std::vector<std::pair<int64_t, at::Tensor>> taken;
  for (size_t i = 0; i < terms_.size(); ++i) taken.emplace_back(terms_[i].index, sums[i]);
  drop();
  return taken;
}

void TensorParallelTerms::drop() {
  for (const auto& [index, gradient] : std::exchange(terms_, {})) {
    accounts_.add(&Counters::gradient_bytes, -static_cast<int64_t>(local_of(gradient).nbytes()));
  }
}

AccumulatedGrads::AccumulatedGrads(const GroupInfo& info, std::vector<FSDPParam>& params,
                                   const ShardBuffer& shards, std::weak_ptr<ShardWrites> writes)
    : info_(info),
      params_(params),
      shards_(shards),
      settings_(info, params),
      unsynchronized_(params.size(), false),
      unsharded_(info, params, std::move(writes)),
      partial_output_(params.size(), info.accounts()),
      terms_(info.accounts()) {}

AccumulatedGrads::~AccumulatedGrads() { drop(); }

bool AccumulatedGrads::is_reduced(size_t index) {
  const bool waits = unsynchronized_[index] || partial_output_.has(static_cast<int64_t>(index));
  return waits || params_[index].is_trainable();
}

std::vector<int64_t> AccumulatedGrads::reduced_params() {
  std::vector<int64_t> indices;
  indices.reserve(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (is_reduced(i)) indices.push_back(static_cast<int64_t>(i));
  }
  return indices;
}

bool AccumulatedGrads::reduces() {
  for (size_t i = 0; info_.unit().policy.synchronize_gradients && i < params_.size(); ++i) {
    if (is_reduced(i)) return true;
  }
  return false;
}

void AccumulatedGrads::keep_unsynchronized() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].is_trainable()) unsynchronized_[i] = true;
  }
}

bool AccumulatedGrads::keeps_gradients() const {
  return std::find(unsynchronized_.begin(), unsynchronized_.end(), true) != unsynchronized_.end() ||
         partial_output_.has_any();
}

void AccumulatedGrads::accumulate(int64_t index) {
  unsharded_.keep(index, settings_.dtype_of(param(index)));
  accumulated_on_.add(current_stream(shards_));
}

std::vector<ReduceScatterInput> AccumulatedGrads::make_inputs() {
  std::vector<at::ScalarType> dtypes;
  const auto indices = reduced_params();
  for (const auto index : indices) {
    const auto dtype = settings_.dtype_of(param(index));
    if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) dtypes.push_back(dtype);
  }
  const auto& codecs = info_.unit().gradient_codecs;
  const auto* const codec = codecs.shards ? codecs.shards.get() : codecs.replicas.get();
  std::vector<ReduceScatterInput> inputs;
  for (const auto dtype : dtypes) {
    std::vector<TrainableParam> members;
    members.reserve(indices.size());
    for (const auto index : indices) {
      if (settings_.dtype_of(param(index)) == dtype) {
        const auto& each = param(index);
        members.push_back({index, each.meta().extent(dtype), shards_.inner_shape(index, each)});
      }
    }
    inputs.emplace_back(std::move(members), dtype, info_.comm_context().transport(),
                        shards_.member_device(), codec);
  }
  return inputs;
}

void AccumulatedGrads::open() {
  if (!reduce_scatter_inputs_.empty() || !info_.unit().policy.synchronize_gradients ||
      settings_.stays_here())
    return;
  const auto on_reduce_stream =
      info_.comm_context().reduce_stream(shards_.member_device()).allocating();
  reduce_scatter_inputs_ = make_inputs();
  for (const auto& input : reduce_scatter_inputs_)
    info_.accounts().add(&Counters::gradient_bytes, input.nbytes());
}

void AccumulatedGrads::receive(int64_t index) {
  const auto member = param(index).member();
  if (param(index).meta().member_spec() || !member.defined() || !is_dtensor(member.grad())) return;
  const auto& spec = spec_of(member.grad());
  TORCH_CHECK_VALUE(
      is_whole_everywhere(spec), "the gradient of parameter '", param(index).name(),
      "' came as a DTensor of ", to_string(spec),
      ": backward() was given a DTensor as the gradient of a plain tensor, and what "
      "other ranks have of it would be lost. Give its full_tensor() (collective; rank ",
      info_.rank(), ")");
  member.mutable_grad() = local_of(member.grad());
}

void AccumulatedGrads::pack(int64_t index) {
  const auto gradient = unsharded_.take(index);
  if (!gradient.defined()) return;
  const auto& home = param(index).meta().member_spec();
  if (!home) return pack_whole(index, gradient);
  if (is_sum_of_terms(gradient, *home)) {
    open();
    accumulated_on_.add(current_stream(shards_));
    return terms_.keep(index, gradient, settings_.dtype_of(param(index)));
  }
  pack_whole(index, local_at_home(gradient, *home));
}

void AccumulatedGrads::pack_whole(int64_t index, const at::Tensor& gradient) {
  if (settings_.stays_here()) return keep_here(index, gradient);
  open();
  for (auto& input : reduce_scatter_inputs_) {
    const auto position = input.position(index);
    if (position >= 0) input.add(position, gradient);
  }
  accumulated_on_.wait_for(current_stream(shards_), StreamWait::kPackAccumulated);
}

// As a reduction over one rank would: it divides in the dtype that sums are made in.
void AccumulatedGrads::keep_here(int64_t index, const at::Tensor& gradient) {
  const auto dtype = settings_.dtype_of(param(index));
  const auto sum = in_dtype(gradient, dtype);
  const auto mean =
      settings_.divisor() != 1 ? in_dtype(sum, sum_dtype(dtype)).div(settings_.divisor()) : sum;
  stayed_.emplace_back(index, on_device(mean, shards_.device()));
  accumulated_on_.add(current_stream(shards_));
}

void AccumulatedGrads::keep_zeros_here() {
  for (const auto index : reduced_params()) {
    const auto entry = param(index).entry();
    const bool has_gradient =
        std::any_of(stayed_.begin(), stayed_.end(),
                    [index](const auto& gradient) { return gradient.first == index; });
    if (has_gradient || !entry.defined() || entry.grad().defined()) continue;
    const auto options =
        at::TensorOptions().dtype(param(index).meta().dtype()).device(shards_.device());
    stayed_.emplace_back(index, at::zeros(param(index).meta().shape(), options));
  }
}

void AccumulatedGrads::publish_what_stayed() {
  if (stayed_.empty()) return;
  const auto came_on = std::exchange(accumulated_on_, {});
  came_on.are_awaited_by(current_stream(shards_), StreamWait::kPackAccumulated);
  for (const auto& [index, gradient] : std::exchange(stayed_, {}))
    accumulate_sharded_grad(param(index), gradient, info_.rank());
  came_on.wait_for(current_stream(shards_), StreamWait::kPackAccumulated);
}

bool AccumulatedGrads::complete() {
  if (!info_.unit().policy.synchronize_gradients) return true;
  if (reduce_scatter_inputs_.empty()) return !reduces();
  return std::all_of(
      reduce_scatter_inputs_.begin(), reduce_scatter_inputs_.end(), [this](const auto& input) {
        return input.complete_but_for([this](int64_t index) { return terms_.has(index); });
      });
}

void AccumulatedGrads::pack_accumulated() {
  if (!info_.unit().policy.synchronize_gradients) return;
  const auto accumulated_on = std::exchange(accumulated_on_, {});
  accumulated_on.are_awaited_by(current_stream(shards_), StreamWait::kPackAccumulated);
  for (size_t i = 0; i < params_.size(); ++i) pack(static_cast<int64_t>(i));
  for (const auto& [index, sum] : terms_.take_sums()) pack_whole(index, sum);
  accumulated_on.wait_for(current_stream(shards_), StreamWait::kPackAccumulated);
  if (settings_.stays_here() && settings_.publishes_unused()) keep_zeros_here();
  unsynchronized_.assign(params_.size(), false);
}

void AccumulatedGrads::drop_accumulated() {
  accumulated_on_.clear();
  unsynchronized_.assign(params_.size(), false);
  for (size_t i = 0; i < params_.size(); ++i) {
    unsharded_.drop(static_cast<int64_t>(i));
    partial_output_.drop(static_cast<int64_t>(i));
  }
}

std::vector<ReduceScatterInput> AccumulatedGrads::take() {
  for (const auto& input : reduce_scatter_inputs_)
    info_.accounts().add(&Counters::gradient_bytes, -input.nbytes());
  return std::exchange(reduce_scatter_inputs_, {});
}

}  // namespace fsdp::internal
