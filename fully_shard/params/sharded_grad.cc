#include "fully_shard/params/sharded_grad.h"

#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/transport/packed_copy.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

bool lies_like(const at::Tensor& gradient, const FSDPParam& param) {
  return is_dtensor(gradient) && spec_of(gradient).mesh() == param.spec().mesh() &&
         spec_of(gradient).placements() == param.spec().placements() &&
         gradient.sizes() == at::IntArrayRef(param.spec().shape());
}

void check_placement(const at::Tensor& gradient, const FSDPParam& param, const char* origin,
                     int64_t global_rank) {
  TORCH_CHECK_VALUE(
      lies_like(gradient, param), origin, " of parameter '", param.name(),
      "' is not a DTensor placed like the parameter (", to_string(param.spec()),
      "); make one with at::zeros_like(parameter), or from the gradient itself (rank ", global_rank,
      ")");
}

at::Tensor run_hooks(const FSDPParam& param, const at::Tensor& entry, at::Tensor gradient,
                     int64_t global_rank) {
  for (const auto& hook : torch::autograd::impl::hooks(entry)) {
    gradient = (*hook)({gradient}).front();
    check_placement(gradient, param, "the gradient that a hook returned", global_rank);
  }
  return gradient;
}

// A half may overflow where it counts once per rank.
bool stays(const Placement& placement, at::ScalarType dtype) {
  if (placement.is_partial())
    return placement.partial_op() == Partial::Op::kAvg ||
           (placement.partial_op() == Partial::Op::kSum && dtype != at::kHalf);
  return placement.is_shard() && !placement.is_interleaved() && dtype != at::kHalf;
}

struct Share {
  std::vector<Placement> placements;  // of the part that this rank brings
  double times = 1;                   // it counts

  at::Tensor of(const at::Tensor& gradient) const {
    const auto part = redistribute_local(local_of(gradient), spec_of(gradient), placements);
    return times == 1 ? part : part.mul(times);
  }
};

// Of what the ranks along dimension `dim` of the gradient's mesh bring, the reduction
// makes the value, if they count it as share.times says then.
bool is_left_to_reduction(const at::Tensor& gradient, int64_t dim, const DeviceMesh& unit_mesh) {
  const auto& spec = spec_of(gradient);
  return spec.mesh().size(dim) > 1 &&
         stays(spec.placements()[static_cast<size_t>(dim)], gradient.scalar_type()) &&
         (spec.mesh() == unit_mesh || covers(unit_mesh, spec.mesh(), dim));
}

void leave(Share& share, const DTensorSpec& spec, int64_t dim) {
  const auto& placement = spec.placements()[static_cast<size_t>(dim)];
  share.placements[static_cast<size_t>(dim)] = placement;
  const bool is_average = placement == Placement(Partial{Partial::Op::kAvg});
  if (!is_average) share.times *= static_cast<double>(spec.mesh().size(dim));
}

// Zeros around this rank's part.
at::Tensor at_its_place(const at::Tensor& part, const DTensorSpec& spec) {
  const auto cuts = spec.without_partials();
  if (cuts == spec.replicated()) return part;
  const auto whole = at::zeros(spec.shape(), part.options());
  local_part(whole, cuts).copy_(part);
  return whole;
}

using torch::autograd::variable_list;

// As the engine does when the gradient of a leaf is there.
void accumulate(const at::Tensor& member, const at::Tensor& gradient) {
  variable_list gradients{gradient};
  for (const auto& hook : torch::autograd::impl::hooks(member)) gradients = (*hook)(gradients);
  (*torch::autograd::impl::grad_accumulator(member))(std::move(gradients));
}

// Before the entry's gradient is accumulated. Belongs to the graph, which ends it.
class WholeGradientHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit WholeGradientHook(at::Tensor member) : member_(std::move(member)) {}

  variable_list operator()(const variable_list& gradients) override {
    const at::Tensor& gradient = gradients.front();
    if (!gradient.defined() || is_dtensor(gradient)) return gradients;
    at::Tensor member = member_;
    if (!member.requires_grad()) member.set_requires_grad(true);  // the entry does, or did
    accumulate(member, gradient);
    return {at::Tensor()};
  }

 private:
  at::Tensor member_;
};

bool is_led(const torch::autograd::Node& accumulator) {
  const auto& hooks = accumulator.pre_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const WholeGradientHook*>(hook.get()) != nullptr;
  });
}

}  // namespace

void accumulate_sharded_grad(FSDPParam& param, const at::Tensor& part, int64_t global_rank) {
  const auto entry = param.entry();
  if (!entry.defined()) return;  // its module is gone; the reduction was issued all the same
  const auto own = make_dtensor(in_dtype(part, param.meta().dtype()), param.spec());
  set_label(own, param.gradient_label());
  auto gradient = run_hooks(param, entry, own, global_rank);
  if (entry.grad().defined()) {
    check_placement(entry.grad(), param, "the .grad", global_rank);
    entry.mutable_grad().add_(gradient);
  } else {
    entry.mutable_grad() = std::move(gradient);
  }
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(entry)) (*hook)(entry);
}

PartialReduceOutput::PartialReduceOutput(size_t param_count, const GroupAccounts& accounts)
    : accounts_(accounts), parts_(param_count) {}

PartialReduceOutput::~PartialReduceOutput() {
  for (size_t i = 0; i < parts_.size(); ++i) drop(static_cast<int64_t>(i));
}

bool PartialReduceOutput::has_any() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const auto& kept) { return kept.defined(); });
}

void PartialReduceOutput::keep(int64_t index, const at::Tensor& part) {
  auto& kept = parts_[static_cast<size_t>(index)];
  if (kept.defined()) {
    kept.add_(part);
    return;
  }
  kept = part.clone();
  accounts_.add(&Counters::gradient_bytes, static_cast<int64_t>(kept.nbytes()));
}

void PartialReduceOutput::drop(int64_t index) {
  const auto kept = std::exchange(parts_[static_cast<size_t>(index)], {});
  if (kept.defined())
    accounts_.add(&Counters::gradient_bytes, -static_cast<int64_t>(kept.nbytes()));
}

void PartialReduceOutput::add_to(ReduceScatterInput& input, at::Tensor& row) {
  for (size_t i = 0; i < input.params().size(); ++i) {
    const auto index = input.params()[i].index;
    if (!has(index)) continue;
    input.add_part(row, static_cast<int64_t>(i), parts_[static_cast<size_t>(index)]);
    drop(index);
  }
}

at::Tensor gradient_share(const at::Tensor& gradient, const DeviceMesh& unit_mesh) {
  const CommCauseScope cause(CommCause::kGradient);
  const auto& spec = spec_of(gradient);
  Share share{spec.replicated().placements()};
  for (int64_t dim = 0; dim < spec.mesh().ndim(); ++dim)
    if (is_left_to_reduction(gradient, dim, unit_mesh)) leave(share, spec, dim);
  return at_its_place(share.of(gradient), spec.with_placements(share.placements));
}

at::Tensor tensor_parallel_share(const at::Tensor& gradient, const DeviceMesh& unit_mesh,
                                 const DeviceMesh& home) {
  const CommCauseScope cause(CommCause::kGradient);
  const auto& spec = spec_of(gradient);
  const int64_t dims = spec.mesh().ndim() - home.ndim();  // of the batch
  const std::vector<Placement> own(spec.placements().begin() + dims, spec.placements().end());
  Share share{spec.replicated().placements()};
  std::copy(own.begin(), own.end(), share.placements.begin() + dims);
  for (int64_t dim = 0; dim < dims; ++dim) {
    // Not parts, which would lie within those of the member.
    const bool is_term = spec.placements()[static_cast<size_t>(dim)].is_partial();
    if (is_term && is_left_to_reduction(gradient, dim, unit_mesh)) leave(share, spec, dim);
  }
  return make_dtensor(share.of(gradient), {home, own, spec.shape(), spec.stride()});
}

void lead_whole_gradients(const at::Tensor& entry, const at::Tensor& member) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(entry);
  if (accumulator == nullptr || is_led(*accumulator)) return;
  accumulator->add_pre_hook(std::make_unique<WholeGradientHook>(member));
}

}  // namespace fsdp::internal
