#include "tests/fully_shard/random_programs/unsharded_program.h"

#include "tests/fully_shard/random_programs/program_optimizer.h"
#include "tests/support/gradient_bound.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace fsdp::testing {

using at::Tensor;

namespace {

// Between neighbouring subnormal numbers of kHalf: what is rounded there loses as much,
// whatever its size.
constexpr double kSmallestHalf = 6e-8;

// Sixteen bits are added up in 32, but by custom reduce-scatters.
at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

}  // namespace

namespace {

Tensor cut(const Tensor& full, const ParamSpec& param, int64_t index, int64_t parts) {
  const auto dim = sharded_dim(param);
  const auto bounds = bounds_of_parts(param, full.size(dim), parts);
  const auto first = bounds[static_cast<size_t>(index)];
  return full.narrow(dim, first, bounds[static_cast<size_t>(index) + 1] - first);
}

}  // namespace

int64_t parts_of(const Program& program) {
  return program.outer == Outer::kShardOptimizer ? program.world : shards_of(program);
}

Tensor part_of(const Tensor& full, const ParamSpec& param, const Program& program, int64_t rank) {
  const auto shards = shards_of(program);
  const auto shard = cut(full, param, rank % shards, shards);
  if (program.outer == Outer::kReplicate) return shard;
  return cut(shard, param, rank / shards, program.replicas);
}

void UnshardedProgram::Arrivals::add(const Tensor& gradient) {
  at::NoGradGuard no_grad;
  ++count;
  const auto size = gradient.to(at::kDouble).abs();
  magnitude = magnitude.defined() ? magnitude + size : size;
}

void UnshardedProgram::Arrivals::add(const Arrivals& other) {
  count += other.count;
  if (!other.magnitude.defined()) return;
  magnitude = magnitude.defined() ? magnitude + other.magnitude : other.magnitude;
}

UnshardedProgram::UnshardedProgram(const Program& program, std::map<int, UnitSpec> sharded)
    : program_(program), sharded_(std::move(sharded)) {
  for (int64_t rank = 0; rank < program.world; ++rank) models_.push_back(build_model(program));
  if (program.sharded)
    cast_buffers(program.root,
                 program.root.is_unit ? program.root.unit.precision : PrecisionSpec{});
  collect_tensors();
  for (const auto& model : models_) {
    optimizers_.push_back(make_optimizer(program.optimizer, optimized_tensors(model)));
  }
}

// `precision`: of the unit that `node` belongs to.
void UnshardedProgram::cast_buffers(const Node& node, const PrecisionSpec& precision) {
  for (const auto& model : models_) {
    for (auto& buffer : model.blocks.at(node.id)->buffers(/*recurse=*/false)) {
      if (precision.buffer_dtype) buffer.set_data(buffer.to(scalar_type(*precision.buffer_dtype)));
    }
  }
  PrecisionSpec joined;
  for (const auto& child : node.children) {
    if (child.is_unit && !child.joins_previous) joined = child.unit.precision;
    cast_buffers(child, child.is_unit ? joined : precision);
  }
}

Tensor UnshardedProgram::value(int id, int64_t rank) const {
  return tensors_.at(id).parameters[static_cast<size_t>(rank)].detach();
}

Tensor UnshardedProgram::gradient(int id, int64_t rank) const {
  return tensors_.at(id).parameters[static_cast<size_t>(rank)].grad();
}

UnshardedProgram::PlainTensor UnshardedProgram::plain_tensor(int id) const {
  const auto dtype = find_param(program_, id)->dtype;
  const auto found = sharded_.find(id);
  const auto unit = found == sharded_.end() ? UnitSpec{} : found->second;
  const auto reduced = scalar_type(reduced_in(unit.precision, dtype));
  return {.dtype = scalar_type(dtype),
          .computed_in = scalar_type(computed_in(unit.precision, dtype)),
          .reduced_in = reduced,
          .summed_in = unit.custom_reduction ? reduced : sum_dtype(reduced),
          .codec = codec_of(unit.precision, models_.front().tensors.at(id).member)};
}

Tensor UnshardedProgram::PlainTensor::converted(const Tensor& parameter) const {
  if (!codec || parameter.numel() == 0) return parameter.detach().to(computed_in);
  const auto rows = parameter.detach().contiguous();
  const auto codes = at::empty({rows.size(0), codec->row_bytes(rows.size(1))}, at::kByte);
  codec->encode(rows, codes);
  auto values = at::empty(rows.sizes(), rows.options().dtype(computed_in));
  codec->decode(codes, values);
  return values;
}

void UnshardedProgram::collect_tensors() {
  for (const auto& model : models_) {
    for (const auto& [id, model_tensor] : model.tensors) {
      auto& tensor = tensors_.try_emplace(id, plain_tensor(id)).first->second;
      auto& member = tensor.members.emplace_back(model_tensor.member);
      const auto unit = sharded_.find(id);
      if (unit != sharded_.end() && unit->second.precision.param_dtype)
        *model_tensor.input_cast = InputCast::kByModel;
      if (tensor.is_converted()) {
        tensor.parameters.push_back(member.detach().clone());
        member.set_data(tensor.converted(member));
      } else {
        tensor.parameters.push_back(member);
      }
      tensor.pending.emplace_back();
      const auto arrivals = tensor.arrivals.emplace_back(std::make_shared<Arrivals>());
      const bool trained = member.requires_grad();
      member.set_requires_grad(true);  // hooks need it; it may be unfrozen later
      member.register_hook([arrivals](const Tensor& gradient) { arrivals->add(gradient); });
      member.set_requires_grad(trained);
    }
  }
}

void UnshardedProgram::refresh_members() {
  at::NoGradGuard no_grad;
  for (auto& [id, tensor] : tensors_) {
    if (!tensor.is_converted()) continue;
    for (size_t r = 0; r < models_.size(); ++r)
      tensor.members[r].copy_(tensor.converted(tensor.parameters[r]));
  }
}

// Tied tensors as often as they are tied, as the module lists them.
std::vector<Tensor> UnshardedProgram::optimized_tensors(const RandomModel& model) {
  const auto rank = static_cast<size_t>(&model - models_.data());
  std::map<at::TensorImpl*, std::vector<Tensor>> parts;
  for (const auto& [id, unit] : sharded_) {
    const auto& tensor = tensors_.at(id);
    if (!tensor.is_converted() && tensor.dtype != at::kBFloat16) continue;
    const auto& parameter = tensor.parameters[rank];
    const auto* const param = find_param(program_, id);
    for (int64_t part = 0; part < parts_of(program_); ++part) {
      const auto chunk = part_of(parameter.detach(), *param, program_, part);
      chunks_.push_back({parameter, param, part, chunk.clone(at::MemoryFormat::Contiguous)});
      parts[tensor.members[rank].unsafeGetTensorImpl()].push_back(chunks_.back().part);
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

// What each rank's backward adds to a sharded tensor is taken alone.
void UnshardedProgram::backward(const std::vector<Losses>& losses, size_t index, bool retain_graph,
                                const ReductionOf& reduction_of) {
  std::map<int, Tensor> before;  // the same on every rank
  for (const auto& [id, unit] : sharded_) {
    auto& tensor = tensors_.at(id);
    tensor.bound.reset();
    for (size_t r = 0; r < models_.size(); ++r) {
      *tensor.arrivals[r] = {};
      before[id] = std::exchange(tensor.parameters[r].mutable_grad(), Tensor());
    }
  }
  for (const auto& of_rank : losses) of_rank.losses[index].backward({}, retain_graph);
  at::NoGradGuard no_grad;
  const auto arrived = tensors_with_arrivals();
  for (const auto& [id, unit] : sharded_)
    reduce(tensors_.at(id), *reduction_of(id, arrived), before[id]);
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

// With what waited before, which stays where this backward does not synchronise.
Tensor UnshardedProgram::take_gradient(PlainTensor& tensor, size_t rank) {
  auto gradient = std::exchange(tensor.members[rank].mutable_grad(), Tensor());
  if (gradient.defined()) gradient = gradient.to(tensor.reduced_in);
  auto earlier = std::exchange(tensor.pending[rank], {});
  tensor.arrivals[rank]->add(earlier.arrivals);
  if (!earlier.gradient.defined()) return gradient;
  return gradient.defined() ? earlier.gradient + gradient : earlier.gradient;
}

void UnshardedProgram::reduce(PlainTensor& tensor, const Reduction& reduction,
                              const Tensor& before) {
  Tensor sum, magnitude;
  for (size_t r = 0; r < models_.size(); ++r) {
    const auto gradient = take_gradient(tensor, r);
    tensor.parameters[r].mutable_grad() = before.defined() ? before.clone() : Tensor();
    if (!reduction.synchronize) {
      tensor.pending[r] = {gradient, *tensor.arrivals[r]};
      continue;
    }
    if (!gradient.defined()) continue;
    const auto term = gradient.to(sum_dtype(tensor.reduced_in));
    sum = sum.defined() ? sum + term : term;
    const auto& arrived = tensor.arrivals[r]->magnitude;
    magnitude = magnitude.defined() ? magnitude + arrived : arrived;
  }
  if (!sum.defined()) return;
  if (reduction.divisor != 1) sum = sum / reduction.divisor;
  sum = sum.to(tensor.dtype);
  const auto total = before.defined() ? before + sum : sum;
  for (auto& parameter : tensor.parameters)
    parameter.mutable_grad() = total.to(parameter.options(), /*non_blocking=*/false, /*copy=*/true);
  auto added = magnitude / reduction.divisor;
  if (before.defined()) added = added + before.abs();
  set_bound(tensor, magnitude, added, reduction.divisor);
}

// Beyond two ranks a sum may be in another order, and so it may be rounded where a custom
// reduce-scatter adds up 16 bits, which ours does not; so may it be where a parameter has
// several gradients to add up (of nested backwards, or of earlier ones without
// synchronisation), which may leave in several reductions. `added`: the sum of the
// absolute values that the gradient is the sum of.
void UnshardedProgram::set_bound(PlainTensor& tensor, const Tensor& magnitude, const Tensor& added,
                                 double divisor) const {
  int arrivals = 1;
  for (const auto& rank : tensor.arrivals) arrivals = std::max(arrivals, rank->count);
  const bool rounds_sums = tensor.summed_in != sum_dtype(tensor.summed_in);
  if (world() <= 2 && arrivals == 1 && !rounds_sums) return;
  double eps = std::max(epsilon_of(tensor.dtype), epsilon_of(tensor.summed_in));
  if (arrivals > 1)
    eps = std::max({eps, epsilon_of(tensor.computed_in), epsilon_of(tensor.reduced_in)});
  const auto terms = static_cast<double>(world() * arrivals - 1);
  tensor.bound = magnitude * (terms * eps / std::min(divisor, 1.0)) + added * (arrivals * eps);
  if (tensor.computed_in == at::kHalf || tensor.reduced_in == at::kHalf)
    tensor.bound = tensor.bound + terms * kSmallestHalf / std::min(divisor, 1.0);
}

void UnshardedProgram::follow_gradient(int id, const Tensor& full) {
  auto& tensor = tensors_.at(id);
  for (auto& parameter : tensor.parameters)
    parameter.mutable_grad() = full.to(tensor.dtype, /*non_blocking=*/false, /*copy=*/true);
  tensor.bound.reset();
}

void UnshardedProgram::drop_gradients() {
  for (auto& [id, tensor] : tensors_) tensor.pending.assign(models_.size(), {});
  zero_grad(/*set_to_none=*/true);
}

void UnshardedProgram::zero_grad(bool set_to_none) {
  for (const auto& model : models_) model.module().zero_grad(set_to_none);
  for (auto& [id, tensor] : tensors_) {
    for (auto& parameter : tensor.parameters) {
      if (!parameter.grad().defined()) continue;
      if (set_to_none) {
        parameter.mutable_grad() = Tensor();
      } else {
        parameter.mutable_grad().zero_();
      }
    }
  }
}

void UnshardedProgram::step() {
  for (auto& [parameter, param, rank, part] : chunks_) {
    part.copy_(part_of(parameter.detach(), *param, program_, rank));
    const auto& gradient = parameter.grad();
    part.mutable_grad() =
        gradient.defined() ? part_of(gradient, *param, program_, rank).contiguous() : Tensor();
  }
  for (auto& optimizer : optimizers_) optimizer->step();
  for (auto& [parameter, param, rank, part] : chunks_)
    part_of(parameter.detach(), *param, program_, rank).copy_(part);
  refresh_members();
}

UnshardedProgram::Clipped UnshardedProgram::clip(double max_norm, double p) {
  at::NoGradGuard no_grad;
  Clipped clipped{.precision = 1e-5};
  for (const auto& [id, unit] : sharded_) {
    const auto value = gradient(id, 0);
    if (!value.defined() || value.numel() == 0) continue;
    if (value.scalar_type() == at::kBFloat16) clipped.precision = 0.05;
    const double norm = value.to(at::kDouble).norm(p).item<double>();
    clipped.norm = std::isinf(p) ? std::max(clipped.norm, norm) : std::hypot(clipped.norm, norm);
  }
  const double scale = std::min(1.0, max_norm / (clipped.norm + 1e-6));
  for (const auto& [id, unit] : sharded_) {
    auto& tensor = tensors_.at(id);
    if (!tensor.parameters.front().grad().defined()) continue;
    for (auto& parameter : tensor.parameters) parameter.mutable_grad().mul_(scale);
    tensor.bound = tensor.parameters.front().grad().abs() * (2 * clipped.precision) + 1e-30;
  }
  return clipped;
}

void UnshardedProgram::set_requires_grad(int id, bool requires_grad) {
  for (auto& member : tensors_.at(id).members) member.set_requires_grad(requires_grad);
}

void UnshardedProgram::multiply(int id, double factor, bool parameter_itself) {
  at::NoGradGuard no_grad;
  auto& tensor = tensors_.at(id);
  for (size_t r = 0; r < models_.size(); ++r) {
    auto& written = parameter_itself ? tensor.parameters[r] : tensor.members[r];
    written.mul_(factor);
    if (!parameter_itself) tensor.parameters[r].copy_(tensor.members[r]);
  }
  if (parameter_itself) refresh_members();
}

}  // namespace fsdp::testing
