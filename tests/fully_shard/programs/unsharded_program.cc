#include "tests/fully_shard/programs/unsharded_program.h"

#include "tests/fully_shard/programs/program_optimizer.h"
#include "tests/support/gradient_bound.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace fsdp::testing {

using at::Tensor;

Tensor chunk_of(const Tensor& full, int64_t dim, int64_t rank, int64_t world) {
  const auto size = full.size(dim);
  const auto length = (size + world - 1) / world;
  const auto first = std::min(size, rank * length);
  return full.narrow(dim, first, std::min(length, size - first));
}

void UnshardedProgram::Arrivals::add(const Tensor& gradient) {
  at::NoGradGuard no_grad;
  ++count;
  magnitude = magnitude.defined() ? magnitude + gradient.abs() : gradient.abs();
}

void UnshardedProgram::Arrivals::add(const Arrivals& other) {
  count += other.count;
  if (!other.magnitude.defined()) return;
  magnitude = magnitude.defined() ? magnitude + other.magnitude : other.magnitude;
}

UnshardedProgram::UnshardedProgram(const Program& program, const std::set<int>& sharded_tensors)
    : program_(program), shards_(shards_of(program)), sharded_(sharded_tensors) {
  for (int64_t rank = 0; rank < program.world; ++rank) models_.push_back(build_model(program));
  for (const auto& [id, tensor] : models_.front().tensors)
    dtypes_.emplace(id, tensor.member.scalar_type());
  if (program.in_double) compute_in_double();
  collect_tensors();
  for (const auto& model : models_) {
    optimizers_.push_back(make_optimizer(program.optimizer, optimized_tensors(model)));
  }
}

// Members are in double from now on, and hold values of the parameters' own dtypes.
void UnshardedProgram::compute_in_double() {
  for (const auto& model : models_) {
    for (const auto& [id, tensor] : model.tensors) {
      const auto member = tensor.member;
      if (sharded_.count(id)) member.set_data(member.detach().to(at::kDouble));
    }
  }
}

Tensor UnshardedProgram::value(int id, int64_t rank) const {
  return member(id, rank).detach().to(dtypes_.at(id));
}

Tensor UnshardedProgram::gradient(int id, int64_t rank) const {
  const auto& gradient = member(id, rank).grad();
  return gradient.defined() ? gradient.to(dtypes_.at(id)) : gradient;
}

void UnshardedProgram::collect_tensors() {
  for (const auto& model : models_) {
    for (const auto& [id, model_tensor] : model.tensors) {
      auto& tensor = tensors_[id];
      tensor.dtype = dtypes_.at(id);
      auto& member = tensor.members.emplace_back(model_tensor.member);
      tensor.pending.emplace_back();
      const auto arrivals = tensor.arrivals.emplace_back(std::make_shared<Arrivals>());
      const bool trained = member.requires_grad();
      member.set_requires_grad(true);  // hooks need it; it may be unfrozen later
      member.register_hook([arrivals](const Tensor& gradient) { arrivals->add(gradient); });
      member.set_requires_grad(trained);
    }
  }
}

// Tied tensors as often as they are tied, as the module lists them.
std::vector<Tensor> UnshardedProgram::optimized_tensors(const RandomModel& model) {
  std::map<at::TensorImpl*, std::vector<Tensor>> parts;
  for (const auto& [id, model_tensor] : model.tensors) {
    const auto& member = model_tensor.member;
    const auto dtype = dtypes_.at(id);
    const bool in_its_own = dtype == member.scalar_type() && dtype != at::kBFloat16;
    if (!sharded_.count(id) || in_its_own) continue;
    const auto dim = sharded_dim(*find_param(program_, id));
    for (int64_t rank = 0; rank < shards_; ++rank) {
      const auto chunk = chunk_of(member.detach(), dim, rank, shards_).to(dtype);
      chunks_.push_back({member, dim, rank, chunk.clone(at::MemoryFormat::Contiguous)});
      parts[member.unsafeGetTensorImpl()].push_back(chunks_.back().part);
    }
  }
  std::vector<Tensor> optimized;
  for (const auto& parameter : model.module().parameters()) {
    const auto found = parts.find(parameter.unsafeGetTensorImpl());
    if (found == parts.end()) {
      optimized.push_back(parameter);
    } else {
      optimized.insert(optimized.end(), found->second.begin(), found->second.end());
    }
  }
  return optimized;
}

// The gradients of sharded tensors start from what is pending, so that what each rank
// adds is seen alone.
void UnshardedProgram::backward(const std::vector<Losses>& losses, size_t index, bool retain_graph,
                                const ReductionOf& reduction_of) {
  std::map<int, Tensor> before;  // the same on every rank
  std::vector<std::pair<std::shared_ptr<Arrivals>, Arrivals>> pending;
  for (auto& [id, tensor] : tensors_) {
    tensor.bound.reset();
    if (!sharded_.count(id)) continue;
    for (size_t r = 0; r < models_.size(); ++r) {
      *tensor.arrivals[r] = {};
      auto earlier = std::exchange(tensor.pending[r], {});
      pending.emplace_back(tensor.arrivals[r], std::move(earlier.arrivals));
      before[id] = std::exchange(tensor.members[r].mutable_grad(), std::move(earlier.gradient));
    }
  }
  for (const auto& of_rank : losses) of_rank.losses[index].backward({}, retain_graph);
  at::NoGradGuard no_grad;
  const auto arrived = tensors_with_arrivals();
  for (const auto& [arrivals, earlier] : pending) arrivals->add(earlier);
  for (const int id : sharded_) reduce(tensors_.at(id), *reduction_of(id, arrived), before[id]);
}

std::set<int> UnshardedProgram::tensors_with_arrivals() const {
  std::set<int> arrived;
  for (const auto& [id, tensor] : tensors_) {
    for (const auto& of_rank : tensor.arrivals) {
      if (of_rank->count > 0) arrived.insert(id);
    }
  }
  return arrived;
}

void UnshardedProgram::reduce(PlainTensor& tensor, const Reduction& reduction,
                              const Tensor& before) {
  Tensor sum, magnitude;
  for (size_t r = 0; r < models_.size(); ++r) {
    auto& member = tensor.members[r];
    auto gradient =
        std::exchange(member.mutable_grad(), before.defined() ? before.clone() : Tensor());
    if (!reduction.synchronize) {
      tensor.pending[r] = {gradient, *tensor.arrivals[r]};
      continue;
    }
    if (!gradient.defined()) continue;
    sum = sum.defined() ? sum + gradient : gradient.clone();
    const auto& arrived = tensor.arrivals[r]->magnitude;
    magnitude = magnitude.defined() ? magnitude + arrived : arrived;
  }
  if (!sum.defined()) return;
  if (reduction.divisor != 1) sum.div_(reduction.divisor);
  sum = sum.to(tensor.dtype);
  auto total = before.defined() ? before.to(tensor.dtype) + sum : sum;
  total = total.to(magnitude.scalar_type());
  for (auto& member : tensor.members) member.mutable_grad() = total.clone();
  auto added = magnitude / reduction.divisor;
  if (before.defined()) added += before.abs();
  set_bound(tensor, magnitude, added, reduction.divisor);
}

// Beyond two ranks a sum may be in another order; so may it be where a parameter has
// several gradients to add up (of nested backwards, or of earlier ones without
// synchronisation), which may leave in several reductions. `added`: the sum of the
// absolute values that the gradient is the sum of.
void UnshardedProgram::set_bound(PlainTensor& tensor, const Tensor& magnitude, const Tensor& added,
                                 double divisor) const {
  int arrivals = 1;
  for (const auto& rank : tensor.arrivals) arrivals = std::max(arrivals, rank->count);
  if (world() <= 2 && arrivals == 1) return;
  const auto eps = epsilon_of(tensor.dtype);
  const auto terms = static_cast<double>(world() * arrivals - 1);
  tensor.bound = magnitude * (terms * eps / std::min(divisor, 1.0)) + added * (arrivals * eps);
}

void UnshardedProgram::follow_gradient(int id, const Tensor& full) {
  auto& tensor = tensors_.at(id);
  for (auto& member : tensor.members)
    member.mutable_grad() = full.to(member.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  tensor.bound.reset();
}

void UnshardedProgram::drop_gradients() {
  for (auto& [id, tensor] : tensors_) tensor.pending.assign(models_.size(), {});
  zero_grad(/*set_to_none=*/true);
}

void UnshardedProgram::zero_grad(bool set_to_none) {
  for (const auto& model : models_) model.module().zero_grad(set_to_none);
}

void UnshardedProgram::step() {
  for (auto& [member, dim, rank, part] : chunks_) {
    part.copy_(chunk_of(member.detach(), dim, rank, shards_));
    if (member.grad().defined()) {
      const auto gradient = chunk_of(member.grad(), dim, rank, shards_);
      part.mutable_grad() = gradient.to(part.scalar_type()).contiguous();
    } else {
      part.mutable_grad() = Tensor();
    }
  }
  for (auto& optimizer : optimizers_) optimizer->step();
  for (auto& [member, dim, rank, part] : chunks_)
    chunk_of(member.detach(), dim, rank, shards_).copy_(part);
}

UnshardedProgram::Clipped UnshardedProgram::clip(double max_norm, double p) {
  at::NoGradGuard no_grad;
  Clipped clipped{.precision = 1e-5};
  for (const int id : sharded_) {
    const auto gradient = member(id, 0).grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    if (dtypes_.at(id) == at::kBFloat16) clipped.precision = 0.05;
    const double norm = gradient.to(at::kDouble).norm(p).item<double>();
    clipped.norm = std::isinf(p) ? std::max(clipped.norm, norm) : std::hypot(clipped.norm, norm);
  }
  const double scale = std::min(1.0, max_norm / (clipped.norm + 1e-6));
  for (const int id : sharded_) {
    auto& tensor = tensors_.at(id);
    if (!tensor.members.front().grad().defined()) continue;
    for (auto& member : tensor.members) member.mutable_grad().mul_(scale);
    tensor.bound = tensor.members.front().grad().abs() * (2 * clipped.precision) + 1e-30;
  }
  return clipped;
}

void UnshardedProgram::set_requires_grad(int id, bool requires_grad) {
  for (auto& member : tensors_.at(id).members) member.set_requires_grad(requires_grad);
}

void UnshardedProgram::multiply(int id, double factor, bool parameter_itself) {
  at::NoGradGuard no_grad;
  for (auto& member : tensors_.at(id).members) {
    const auto written = parameter_itself ? member.to(dtypes_.at(id)) * factor : member * factor;
    member.copy_(written.to(dtypes_.at(id)));
  }
}

}  // namespace fsdp::testing
