#include "device_mesh/collectives/collectives.h"
#include "dtensor/internal/dtensor_impl.h"
#include "fully_shard/fully_shard.h"

#include <ATen/ops/clamp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cmath>
#include <map>
#include <utility>

namespace fsdp {
namespace {

// The joint norm as a reduction: the largest absolute value, or the sum of p-th powers.
class NormTerms {
 public:
  NormTerms(double p, c10::Device device)
      : p_(p), total_(at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device))) {}

  void add(const at::Tensor& values) {
    if (values.numel() == 0) return;  // the largest of nothing has no value, and adds nothing
    combine(powered(at::linalg_vector_norm(values, p_, std::nullopt, false, norm_dtype(values))
                        .to(total_.options())));
  }
  void combine(const at::Tensor& term) {
    total_ = std::isinf(p_) ? at::maximum(total_, term) : total_.add(term);
  }
  void all_reduce(const internal::Group& group) {
    internal::all_reduce(group, total_,
                         std::isinf(p_) ? internal::ReduceOp::kMax : internal::ReduceOp::kSum)
        .wait("all-reduce of clip_grad_norm_");
  }
  const at::Tensor& total() const { return total_; }
  at::Tensor norm() const { return std::isinf(p_) || p_ == 1 ? total_ : total_.pow(1 / p_); }

 private:
  // Half precision overflows in sums of powers.
  static std::optional<at::ScalarType> norm_dtype(const at::Tensor& values) {
    return at::isReducedFloatingType(values.scalar_type()) ? std::optional(at::kFloat)
                                                           : std::nullopt;
  }
  at::Tensor powered(const at::Tensor& norm) const {
    return std::isinf(p_) || p_ == 1 ? norm : norm.pow(p_);
  }

  double p_;
  at::Tensor total_;
};

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm,
                           double norm_type) {
  TORCH_CHECK_VALUE(max_norm >= 0, "clip_grad_norm_: max_norm is ", max_norm,
                    "; it must not be negative");
  TORCH_CHECK_VALUE(norm_type > 0, "clip_grad_norm_: norm_type is ", norm_type,
                    "; it must be positive or inf");
  c10::NoGradGuard no_grad;
  std::vector<at::Tensor> locals;
  std::vector<std::pair<DeviceMesh, NormTerms>>
      sharded;  // one per distinct mesh, in order of appearance
  std::optional<NormTerms> total;
  auto dtype = at::kFloat;
  for (const auto& param : params) {
    const auto& gradient = param.grad();
    if (!gradient.defined()) continue;
    if (!total) total.emplace(norm_type, gradient.device());
    dtype = c10::promoteTypes(dtype, c10::toRealValueType(gradient.scalar_type()));
    if (!is_dtensor(gradient)) {
      total->add(gradient);
      locals.push_back(gradient);
      continue;
    }
    const auto& spec = *internal::spec_of(gradient);
    TORCH_CHECK_NOT_IMPLEMENTED(spec.mesh.ndim() == 1 && spec.placements.front().is_shard(),
                                "clip_grad_norm_: a gradient of shape ", gradient.sizes(),
                                " is placed as ", to_string(spec.placements.front()), " on ",
                                to_string(spec.mesh),
                                "; only shards on 1-D meshes are implemented yet");
    auto found = std::find_if(sharded.begin(), sharded.end(),
                              [&spec](const auto& item) { return item.first == spec.mesh; });
    if (found == sharded.end()) {
      found = sharded.emplace(sharded.end(), spec.mesh, NormTerms(norm_type, gradient.device()));
    }
    found->second.add(internal::local_of(gradient));
    locals.push_back(internal::local_of(gradient));
  }
  if (!total) return at::zeros({});
  for (auto& [mesh, terms] : sharded) {
    terms.all_reduce(mesh.group(0));
    total->combine(terms.total());
  }
  const auto norm = total->norm();
  const auto scale = at::clamp(norm.add(1e-6).reciprocal().mul(max_norm), std::nullopt, 1.0);
  for (auto& local : locals) local.mul_(scale.to(local.scalar_type()));
  return norm.to(dtype);
}

}  // namespace fsdp
