#include "dtensor/families/pointwise.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/shard_layout.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace fsdp::internal {
namespace {

bool is_linear(const Placement& placement) {
  return placement.is_partial() && (placement.partial_op() == Partial::Op::kSum ||
                                    placement.partial_op() == Partial::Op::kAvg);
}

bool is_idempotent(const Placement& placement) {
  return placement.is_partial() && placement.partial_op() != Partial::Op::kSum &&
         placement.partial_op() != Partial::Op::kProduct;
}

class Planner {
 public:
  explicit Planner(const PointwiseProblem& problem)
      : call_(problem.call),
        operands_(problem.operands),
        written_(problem.written),
        linearity_(problem.linearity),
        leader_(problem.written.has_value() ? *problem.written : most_sharded()) {}

  PointwisePlan plan() {
    check_operands();
    if (all_lie_alike()) {
      shape_ = spec(leader_).shape;
      return alike();
    }
    shape_ = result_shape();
    const auto target = written_.has_value() ? written_placements() : target_placements();
    PointwisePlan plan{.result = result_spec(target), .locals = {}};
    plan.locals.reserve(operands_.size());
    for (size_t i = 0; i < operands_.size(); ++i) plan.locals.push_back(local_operand(i, target));
    return plan;
  }

 private:
  const DTensorSpec& spec(size_t i) const { return *spec_of(operands_[i]); }
  const std::vector<Placement>& placements(size_t i) const { return spec(i).placements; }

  std::string what() const {
    std::ostringstream out;
    out << call_.name() << " on (";
    for (size_t i = 0; i < operands_.size(); ++i)
      out << (i == 0 ? "" : "; ") << describe(operands_[i]);
    out << ")";
    return out.str();
  }

  size_t most_sharded() const {
    size_t leader = 0;
    std::pair<int64_t, int64_t> most{-1, -1};
    for (size_t i = 0; i < operands_.size(); ++i) {
      if (!is_dtensor(operands_[i])) continue;
      const auto& own = placements(i);
      const auto shards =
          std::count_if(own.begin(), own.end(), [](const auto& p) { return p.is_shard(); });
      const std::pair<int64_t, int64_t> rank{shards, operands_[i].dim()};
      if (rank > most) {
        most = rank;
        leader = i;
      }
    }
    return leader;
  }

  void check_operands() const {
    TORCH_CHECK_VALUE(
        is_dtensor(operands_[leader_]), what(),
        " writes a plain tensor from DTensors. Write into a DTensor, or pass .full_tensor() or "
        ".to_local() of the operands.");
    const DTensorSpec& leader = spec(leader_);
    for (const at::Tensor& operand : operands_) {
      if (!is_dtensor(operand)) {
        TORCH_CHECK_VALUE(
            operand.numel() == 1 && operand.dim() <= operands_[leader_].dim(), what(),
            " mixes DTensors with a plain tensor of more than one element. Distribute it first, "
            "fsdp::distribute_tensor(t, mesh, placements), or compute with the DTensor's "
            ".full_tensor() (collective; rank ",
            leader.mesh.rank(), ").");
        continue;
      }
      const DTensorSpecPtr& other = spec_of(operand);
      TORCH_CHECK_VALUE(
          other.get() == &leader || other->mesh == leader.mesh, what(),
          " has operands on different meshes; bring them to one mesh with .full_tensor() and "
          "fsdp::distribute_tensor (rank ",
          leader.mesh.rank(), ").");
    }
  }

  // The common case: one spec for all, nothing Partial.
  bool all_lie_alike() const {
    const DTensorSpecPtr& leader = spec_of(operands_[leader_]);
    for (const at::Tensor& operand : operands_) {
      if (is_dtensor(operand) ? spec_of(operand) != leader : operand.dim() > 0) return false;
    }
    return std::none_of(leader->placements.begin(), leader->placements.end(),
                        [](const auto& placement) { return placement.is_partial(); });
  }

  PointwisePlan alike() const {
    PointwisePlan plan{.result = result_spec(placements(leader_)), .locals = {}};
    plan.locals.reserve(operands_.size());
    for (const at::Tensor& operand : operands_) {
      plan.locals.push_back(is_dtensor(operand) ? local_of(operand) : operand);
    }
    return plan;
  }

  std::vector<int64_t> result_shape() const {
    std::vector<int64_t> shape;
    for (const at::Tensor& operand : operands_) shape = at::infer_size(shape, operand.sizes());
    TORCH_CHECK_VALUE(
        !written_.has_value() || at::IntArrayRef(shape) == operands_[*written_].sizes(), what(),
        ": the result's shape ", at::IntArrayRef(shape),
        " does not fit the tensor it is written to");
    return shape;
  }

  std::vector<Placement> written_placements() const {
    const auto& target = placements(*written_);
    for (size_t m = 0; m < target.size(); ++m) {
      TORCH_CHECK_NOT_IMPLEMENTED(!target[m].is_partial() || keeps_partial(m), what(),
                                  " writes in place to a tensor ", "placed ", target[m],
                                  ", which the operator cannot do term by term. Call "
                                  ".redistribute({Replicate()}) first (collective).");
    }
    return target;
  }

  std::vector<Placement> target_placements() const {
    const int64_t shift = static_cast<int64_t>(shape_.size()) - operands_[leader_].dim();
    auto target = placements(leader_);
    for (size_t m = 0; m < target.size(); ++m) {
      if (target[m].is_partial() && !keeps_partial(m)) target[m] = Replicate{};
      if (!target[m].is_shard()) continue;
      const int64_t dim = target[m].shard_dim();
      const bool kept = operands_[leader_].size(dim) == shape_[dim + shift];
      target[m] = kept ? Placement(Shard{dim + shift}) : Placement(Replicate{});
    }
    return target;
  }

  bool keeps_partial(size_t m) const {
    const Placement& own = placements(leader_)[m];
    switch (linearity_) {
      case Linearity::kNone:
        return false;
      case Linearity::kAny:
        return true;
      case Linearity::kIdempotent:
        return is_idempotent(own);
      case Linearity::kUnary:
        return is_linear(own);
      case Linearity::kSum:
        return is_linear(own) &&
               std::all_of(operands_.begin(), operands_.end(), [&](const at::Tensor& operand) {
                 return is_dtensor(operand) && spec_of(operand)->placements[m] == own;
               });
      case Linearity::kScale:
        return is_linear(own) && leader_ == 0 && others_are_whole(m);
    }
    return false;
  }

  bool others_are_whole(size_t m) const {
    for (size_t i = 1; i < operands_.size(); ++i) {
      if (is_dtensor(operands_[i]) && !placements(i)[m].is_replicate()) return false;
    }
    return true;
  }

  DTensorSpecPtr result_spec(const std::vector<Placement>& target) const {
    if (written_.has_value()) return spec_of(operands_[*written_]);
    const DTensorSpecPtr& leader = spec_of(operands_[leader_]);
    const bool same_shape = leader->shape == shape_;
    const bool dense = operands_[leader_].is_non_overlapping_and_dense();
    if (same_shape && dense && leader->placements == target) return leader;
    auto strides = same_shape ? dense_strides(shape_, leader->stride) : contiguous_strides(shape_);
    return intern_spec({leader->mesh, target, shape_, std::move(strides)});
  }

  at::Tensor local_operand(size_t i, const std::vector<Placement>& target) const {
    const at::Tensor& operand = operands_[i];
    if (!is_dtensor(operand)) return operand;
    const int64_t shift = static_cast<int64_t>(shape_.size()) - operand.dim();
    auto wanted = target;
    for (auto& placement : wanted) {
      if (placement.is_partial() && linearity_ == Linearity::kScale && i > 0)
        placement = Replicate{};
      if (!placement.is_shard()) continue;
      const int64_t dim = placement.shard_dim() - shift;
      const bool cut = dim >= 0 && operand.size(dim) == shape_[placement.shard_dim()];
      placement = cut ? Placement(Shard{dim}) : Placement(Replicate{});
    }
    return redistribute_local(local_of(operand), spec(i), wanted);
  }

  const OperatorCall& call_;
  const std::vector<at::Tensor>& operands_;
  std::optional<size_t> written_;
  Linearity linearity_;
  size_t leader_;
  std::vector<int64_t> shape_ = {};
};

}  // namespace

PointwiseOperands::PointwiseOperands(const OperatorCall& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      call.traits().written.size() <= 1, call.description(), ": no sharding rule for ",
      "operators with several outputs written in place; use the functional form");
  for (size_t i = 0; i < call.argument_count(); ++i) {
    const c10::IValue& argument = call.argument(i);
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    if (!call.traits().written.empty() && call.traits().written[0] == i) written = tensors.size();
    arguments.push_back(i);
    tensors.push_back(argument.toTensor());
  }
}

PointwisePlan plan_pointwise(const PointwiseProblem& problem) { return Planner(problem).plan(); }

void run_pointwise(OperatorCall& call, const PointwiseOperands& operands, PointwisePlan plan) {
  for (size_t i = 0; i < operands.arguments.size(); ++i) {
    call.argument(operands.arguments[i]) = std::move(plan.locals[i]);
  }
  auto results = call.run();
  for (size_t i = 0; i < results.size(); ++i) {
    if (call.traits().returned_argument[i].has_value()) {
      results[i] = operands.tensors[*operands.written];
    } else {
      results[i] = make_dtensor(results[i].toTensor(), plan.result);
    }
  }
  call.finish(std::move(results));
}

}  // namespace fsdp::internal
