#include "fully_shard/clip_grad_norm.h"

#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/train/same_parameters.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

bool belong_together(const at::Tensor& a, const at::Tensor& b) {
  return a.device() == b.device() && a.scalar_type() == b.scalar_type();
}

at::Tensor norms_of(const std::vector<at::Tensor>& list, double p) {
  const bool is_half = at::isReducedFloatingType(list.front().scalar_type());
  const auto dtype = is_half ? std::optional(at::kFloat) : std::nullopt;
  return at::stack(at::_foreach_norm(list, p, dtype)).to(at::kDouble);
}

// Tensors on devices, in lists of one device and dtype: what is done with all of them is
// one launch for each list. Local.
class TensorLists {
 public:
  // REQUIRES: has elements, of which LibTorch's lists make an error in some norms.
  void add(const at::Tensor& tensor);
  bool empty() const { return lists_.empty(); }
  // Of each tensor, on the first one's device; of half precision in float, which does not
  // overflow. REQUIRES: not empty.
  at::Tensor norms(double p) const;
  // Each by `factor`, a number in a tensor, in its own dtype.
  void multiply(const at::Tensor& factor) const;

 private:
  std::vector<std::vector<at::Tensor>> lists_;
};

void TensorLists::add(const at::Tensor& tensor) {
  const auto list = std::find_if(lists_.begin(), lists_.end(), [&](const auto& each) {
    return belong_together(each.front(), tensor);
  });
  if (list != lists_.end()) return list->push_back(tensor);
  lists_.push_back({tensor});
}

at::Tensor TensorLists::norms(double p) const {
  const auto device = lists_.front().front().device();
  std::vector<at::Tensor> all;
  for (const auto& list : lists_) all.push_back(norms_of(list, p).to(device));
  return all.size() == 1 ? all.front() : at::cat(all);
}

void TensorLists::multiply(const at::Tensor& factor) const {
  for (const auto& list : lists_) {
    at::_foreach_mul_(list, factor.to(list.front().device(), list.front().scalar_type()));
  }
}

// Half precision overflows in sums of powers.
std::optional<at::ScalarType> norm_dtype(const at::Tensor& values) {
  return at::isReducedFloatingType(values.scalar_type()) ? std::optional(at::kFloat) : std::nullopt;
}

// How a joint p-norm adds up: terms are p-th powers, or the largest absolute value.
struct NormKind {
  double p;

  bool is_largest() const { return std::isinf(p); }
  at::Tensor term(const at::Tensor& values) const {
    const auto norm = at::linalg_vector_norm(values, p, std::nullopt, false, norm_dtype(values));
    return term_of_norm(norm.to(at::kDouble));
  }
  at::Tensor term_of_norm(const at::Tensor& norm) const {
    return is_largest() || p == 1 ? norm : norm.pow(p);
  }
  at::Tensor joined(const at::Tensor& a, const at::Tensor& b) const {
    return is_largest() ? at::maximum(a, b) : a.add(b);
  }
  at::Tensor joined(const at::Tensor& terms) const {
    return is_largest() ? terms.amax() : terms.sum();
  }
  at::Tensor norm(const at::Tensor& term) const {
    return is_largest() || p == 1 ? term : term.pow(1 / p);
  }
};

// What all ranks must ask for alike.
class Request {
 public:
  Request(double max_norm, double norm_type) : max_norm_(max_norm), norm_type_(norm_type) {}

  // A parameter whose gradient is sharded; plain ones may lack a gradient here.
  void add(const at::Tensor& placed) {
    const auto& spec = internal::spec_of(placed);
    hash_ = c10::hash_combine(hash_, static_cast<size_t>(placed.scalar_type()));
    for (const int64_t size : placed.sizes())
      hash_ = c10::hash_combine(hash_, static_cast<size_t>(size));
    for (const auto& placement : spec.placements())
      hash_ = c10::hash_combine(hash_, placement.hash());
    for (const int64_t size : spec.mesh().shape())
      hash_ = c10::hash_combine(hash_, static_cast<size_t>(size));
    placed_.push_back(placed);
  }

  void claim(internal::Claims& claims) const {
    claims.add("max_norm", max_norm_);
    claims.add("norm_type", norm_type_);
    claims.add("what they clip", hash_, [this] { return text(); });
  }

 private:
  std::string text() const {
    int64_t elements = 0;
    for (const auto& each : placed_) elements += each.numel();
    auto text = c10::str(placed_.size(), " parameters of ", elements, " elements\n");
    for (const auto& each : placed_) {
      const auto& spec = internal::spec_of(each);
      text += c10::str("a parameter of shape ", each.sizes(), " and dtype ", each.scalar_type(),
                       ", placed as ", to_string(spec), "\n");
    }
    return text;
  }

  double max_norm_, norm_type_;
  std::vector<at::Tensor> placed_;
  size_t hash_ = 0;
};

// This rank's term of some gradients. Those on the CPU are joined one by one, as they
// come; those on devices at once.
class Term {
 public:
  explicit Term(NormKind kind) : kind_(kind) {}

  bool is_met() const { return device_.has_value(); }
  void meet(c10::Device device) {
    if (!device_) device_ = device;
  }
  void add(const at::Tensor& local) {
    if (local.numel() == 0) return;  // the largest of nothing has no value
    if (!local.is_cpu()) return on_devices_.add(local);
    const auto before = joined_.defined() ? joined_ : zero();
    joined_ = kind_.joined(before, kind_.term(local).to(*device_));
  }
  // A number on the device that was met first. REQUIRES: met.
  at::Tensor value() const {
    if (on_devices_.empty()) return joined_.defined() ? joined_ : zero();
    const auto of_devices = kind_.joined(kind_.term_of_norm(on_devices_.norms(kind_.p)));
    const auto here = of_devices.to(*device_);
    return joined_.defined() ? kind_.joined(joined_, here) : here;
  }

 private:
  at::Tensor zero() const {
    return at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(*device_));
  }

  NormKind kind_;
  std::optional<c10::Device> device_;
  at::Tensor joined_;  // of those on the CPU; undefined for none
  TensorLists on_devices_;
};

// Of the gradients that lie on one mesh.
struct MeshTerm {
  DeviceMesh mesh;
  Term term;
};

class Gradients {
 public:
  Gradients(NormKind kind, double max_norm, const std::vector<at::Tensor>& params)
      : kind_(kind), request_(max_norm, kind.p), plain_(kind) {
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const auto& param : params) {
      if (param.defined() && seen.insert(param.unsafeGetTensorImpl()).second) add(param);
    }
  }

  // Collective over covering_mesh() unless all is plain.
  at::Tensor norm() const {
    if (meshes_.empty())
      return kind_.norm(plain_.is_met() ? plain_.value() : at::zeros({}, at::kDouble));
    const auto rows = gather(covering_mesh());
    auto total = rows.select(1, 0).amax();  // plain gradients are copies of each other
    for (size_t i = 0; i < meshes_.size(); ++i) {
      const auto column = static_cast<int64_t>(2 * i + 1);
      const auto& here = meshes_[i].mesh;
      const auto term = here.size() == rows.size(0)
                            ? kind_.joined(rows.select(1, column + 1))
                            : term_of_one_copy(here, rows.slice(1, column, column + 2));
      total = kind_.joined(total, term);
    }
    return kind_.norm(total);
  }

  void scale(const at::Tensor& factor) const {
    for (const auto& local : locals_on_cpu_)
      local.mul_(factor.to(local.device(), local.scalar_type()));
    locals_on_devices_.multiply(factor);
  }
  at::ScalarType norm_dtype() const { return dtype_; }

 private:
  void add(const at::Tensor& param) {
    const auto& gradient = param.grad();
    const auto& placed = is_dtensor(param) ? param : gradient;
    if (!placed.defined()) return;
    dtype_ = c10::promoteTypes(dtype_, c10::toRealValueType(placed.scalar_type()));
    // A mesh takes part whether or not this rank has gradients on it, since ranks must
    // agree on what is gathered.
    if (is_dtensor(placed)) request_.add(placed);
    params_.push_back(param);
    auto& term = is_dtensor(placed) ? term_on(internal::spec_of(placed).mesh()) : plain_;
    term.meet(placed.device());
    if (!gradient.defined()) return;
    const auto& local = is_dtensor(gradient) ? internal::local_of(gradient) : gradient;
    if (local.is_cpu()) {
      locals_on_cpu_.push_back(local);
    } else if (local.numel() > 0) {
      locals_on_devices_.add(local);
    }
    if (!is_dtensor(gradient) || counts_here(gradient)) term.add(local);
  }

  Term& term_on(const DeviceMesh& mesh) {
    for (auto& item : meshes_) {
      if (item.mesh == mesh) return item.term;
    }
    return meshes_.emplace_back(MeshTerm{mesh, Term(kind_)}).term;
  }

  // A dimension on which a gradient is replicated counts at its first coordinate.
  static bool counts_here(const at::Tensor& gradient) {
    const auto& spec = internal::spec_of(gradient);
    bool counts = true;
    for (size_t dim = 0; dim < spec.placements().size(); ++dim) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !spec.placements()[dim].is_partial(), "clip_grad_norm_: a gradient of shape ",
          gradient.sizes(), " is placed as ", to_string(spec),
          "; what is still to be reduced has no norm: redistribute it first (rank ",
          spec.mesh().rank(), ")");
      if (spec.placements()[dim].is_replicate()) counts &= spec.mesh().coordinate()[dim] == 0;
    }
    return counts;
  }

  // The smallest mesh that has the ranks of all meshes met: one of them, or that of the
  // default group, which also stands for one of several dimensions with its ranks: what
  // is gathered at once.
  DeviceMesh covering_mesh() const {
    std::set<int64_t> ranks;
    std::vector<DeviceMesh> candidates;
    for (const auto& [mesh, term] : meshes_) {
      ranks.insert(mesh.ranks().begin(), mesh.ranks().end());
      candidates.push_back(mesh);
    }
    const auto covers = [&ranks](const DeviceMesh& mesh) {
      const std::set<int64_t> has(mesh.ranks().begin(), mesh.ranks().end());
      return std::includes(has.begin(), has.end(), ranks.begin(), ranks.end());
    };
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const auto& a, const auto& b) { return a.size() < b.size(); });
    const auto found = std::find_if(candidates.begin(), candidates.end(), covers);
    if (found != candidates.end() && found->ndim() == 1) return *found;
    const auto& any = candidates.front();
    std::optional<DeviceMesh> world;
    if (is_process_group_initialized())
      world = DeviceMesh::from_group(default_process_group(), any.device_type());
    if (found != candidates.end()) {
      const bool is_world = world && world->size() == found->size() && covers(*world);
      return is_world ? *world : *found;
    }
    TORCH_CHECK_VALUE(world && covers(*world), "clip_grad_norm_: the gradients lie on ",
                      names(candidates),
                      ", and neither one of these meshes nor the default process group has all "
                      "their ranks, over which the norm would be agreed; call it once per mesh "
                      "(rank ",
                      any.rank(), ")");
    return *world;
  }

  static std::string names(const std::vector<DeviceMesh>& meshes) {
    std::string text;
    for (const auto& mesh : meshes) text += (text.empty() ? "" : ", ") + to_string(mesh);
    return text;
  }

  // One row per rank of `mesh`: {plain, then per mesh met its first rank and the term}.
  // On the CPU the ranks compare what they clip by the same message: those that clip two
  // models of equal shapes would make one norm of both. On a device that would stall the
  // host.
  at::Tensor gather(const DeviceMesh& mesh) const {
    const auto first = meshes_.front().term.value();
    const auto options = first.options();
    std::vector<at::Tensor> row = {plain_.is_met() ? plain_.value().to(options.device())
                                                   : at::zeros({}, options)};
    for (size_t i = 0; i < meshes_.size(); ++i) {
      const auto& [of, term] = meshes_[i];
      row.push_back(at::full({}, static_cast<double>(of.ranks().front()), options));
      row.push_back(i == 0 ? first : term.value().to(options.device()));
    }
    auto own = at::stack(row);
    internal::Claims claims("clip_grad_norm_");
    if (own.is_cpu()) {
      request_.claim(claims);
      internal::claim_parameters(claims, params_);
      own = at::cat({own, claims.words().view(at::kDouble)});
    }
    const auto rows = internal::rows_of_all(
        internal::collectives_of(mesh),
        {.row = own, .what = "all-gather of clip_grad_norm_", .call = "clip_grad_norm_"});
    const auto terms = static_cast<int64_t>(row.size());
    if (own.is_cpu())
      claims.check_words(rows.slice(1, terms).contiguous().view(at::kLong), mesh,
                         "every rank must call it with the same parameters of the same model, in "
                         "one order, and the same max_norm and norm_type; nothing was scaled");
    return rows.slice(1, 0, terms);
  }

  // `rows`: {first rank of the mesh, term}. Several copies of the mesh beside each other
  // hold copies of the same parameters, if their norms are the same.
  at::Tensor term_of_one_copy(const DeviceMesh& mesh, const at::Tensor& rows) const {
    const auto host = rows.to(at::kCPU).contiguous();
    std::map<double, std::vector<at::Tensor>> copies;  // by first rank
    for (int64_t i = 0; i < host.size(0); ++i)
      copies[host[i][0].item<double>()].push_back(host[i][1]);
    std::map<double, double> norms;
    for (const auto& [first_rank, terms] : copies)
      norms[first_rank] = kind_.norm(kind_.joined(at::stack(terms))).item<double>();
    const auto& [one_rank, one] = *norms.begin();
    for (const auto& [other_rank, other] : norms) {
      const bool same = one == other || (std::isnan(one) && std::isnan(other)) ||
                        std::abs(one - other) <= 1e-6 * std::max(one, other);
      TORCH_CHECK_VALUE(same, "clip_grad_norm_: the gradients on ", to_string(mesh),
                        " that begins "
                        "at rank ",
                        one_rank, " have the norm ", one,
                        ", those on the one that "
                        "begins at rank ",
                        other_rank, " have ", other,
                        ": they are no copies of each other, as those of experts are not. Call "
                        "it once per group of ranks that has the parameters in common (rank ",
                        mesh.rank(), ")");
    }
    return kind_.joined(at::stack(copies.begin()->second)).to(rows.device());
  }

  NormKind kind_;
  Request request_;
  std::vector<at::Tensor> params_;  // that have a gradient, or a place for one
  std::vector<MeshTerm> meshes_;    // in order of appearance
  Term plain_;                      // of the plain gradients
  std::vector<at::Tensor> locals_on_cpu_;
  TensorLists locals_on_devices_;
  at::ScalarType dtype_ = at::kFloat;
};

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm, double norm_type,
                           bool error_if_nonfinite) {
  TORCH_CHECK_VALUE(max_norm >= 0, "clip_grad_norm_: max_norm is ", max_norm,
                    "; it must be a number that is not negative");
  TORCH_CHECK_VALUE(norm_type > 0, "clip_grad_norm_: norm_type is ", norm_type,
                    "; it must be positive or inf");
  const c10::NoGradGuard no_grad;
  const Gradients gradients({norm_type}, max_norm, params);
  const auto norm = gradients.norm();
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm.item().toDouble()),
              "clip_grad_norm_: the norm of order ", norm_type, " of the gradients is ",
              norm.item().toDouble(),
              " on every rank, and error_if_nonfinite is set; nothing was scaled");
  gradients.scale(at::clamp(norm.add(1e-6).reciprocal().mul(max_norm), std::nullopt, 1.0));
  return norm.to(gradients.norm_dtype());
}

}  // namespace fsdp
