// Every rank draws the numbers of the whole tensor and keeps its part, so that they are
// those of one device on any number of ranks. Costs the memory of the whole while it
// runs. The ranks' generators must be in the same state (manual_seed.h). Local unless a
// handler says otherwise.
#include "dtensor/dispatch/local_tensors.h"
#include "dtensor/dispatch/operands.h"
#include "dtensor/dtensor.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/random/thread_generators.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/strategy/pointwise_strategy.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/leaky_relu.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

// Whether the thread's generator is what the operator draws from.
bool draws_from_thread(OperatorCall& call, const c10::Device& device) {
  if (!thread_generators()) return false;
  const c10::IValue* const given = call.find_argument("generator");
  return given == nullptr || !given->isGenerator() ||
         given->toGenerator() == thread_generators()->on(device);
}

void check_in_step(OperatorCall& call, const at::Tensor& dtensor) {
  if (!draws_from_thread(call, dtensor.device())) return;
  const DeviceMesh& mesh = spec_of(dtensor).mesh();
  TORCH_CHECK_VALUE(thread_generators()->are_in_step_on(mesh), call.description(),
                    ": manual_seed has ranks ", c10::IntArrayRef(thread_generators()->ranks()),
                    " in step, and the tensor lies on ranks ", c10::IntArrayRef(mesh.ranks()),
                    ", which would keep parts of different numbers. Call manual_seed with a mesh "
                    "of all of them first, or give the operator a generator (rank ",
                    mesh.rank(), ")");
}

at::Tensor whole_like(const at::Tensor& self) {
  const DTensorSpec& spec = spec_of(self);
  return at::empty_strided(spec.shape(), spec.stride(), local_of(self).options());
}

// A new DTensor over a copy of this rank's part of `whole`, which lies in memory as that.
at::Tensor part_of_drawn(const at::Tensor& whole, const DTensorSpec& spec) {
  const at::Tensor part = local_part(whole, spec).clone();
  return make_dtensor(part, spec.with_geometry(spec.shape(), whole.strides().vec()));
}

// Writes `drawn`, the whole value, to `self`.
void keep_part(const at::Tensor& self, const at::Tensor& drawn) {
  local_of(self).copy_(placed_whole(drawn, spec_of(self)));
}

// normal_(), bernoulli_(p): no value is read.
void fill_randomly(OperatorCall& call, const StrategyKernel*) {
  const at::Tensor self = call.argument(0).toTensor();
  check_in_step(call, self);
  call.argument(0) = whole_like(self);
  auto results = call.run();
  keep_part(self, results[0].toTensor());
  call.finish(self);
}

// rand_like(), bernoulli(p): a new tensor that lies as `self`, of which no value is read.
void draw_like(OperatorCall& call, const StrategyKernel*) {
  const at::Tensor self = call.argument(0).toTensor();
  check_in_step(call, self);
  call.argument(0) = whole_like(self);
  auto results = call.run();
  call.finish(part_of_drawn(results[0].toTensor(), spec_of(self).without_partials()));
}

// As the first DTensor of its shape, or whole.
at::Tensor laid_like(const at::Tensor& drawn, at::TensorList operands) {
  const auto fits = [&](const at::Tensor& operand) {
    return operand.defined() && is_dtensor(operand) && operand.sizes() == drawn.sizes();
  };
  const auto model = std::find_if(operands.begin(), operands.end(), fits);
  if (model != operands.end()) return part_of_drawn(drawn, spec_of(*model).without_partials());
  const auto any = std::find_if(operands.begin(), operands.end(), is_dtensor);
  return replicated_result(drawn, spec_of(*any).mesh());
}

constexpr int kNoArgument = -1;

// Draws depend on the values of the arguments, so every rank needs those whole, except of
// `only_shape`, which the operator does not read. Collective over the mesh dimensions
// that cut or have terms of one.
template <int only_shape>
void draw_by_values(OperatorCall& call, const StrategyKernel*) {
  const auto operands = ArgumentKinds(call.handle().schema()).operands_of(call);
  common_mesh(call, operands);
  check_in_step(call, *std::find_if(operands.begin(), operands.end(), is_dtensor));
  const auto given = call.arguments();
  for (size_t i = 0; i < call.argument_count(); ++i) {
    c10::IValue& argument = call.argument(i);
    if (!argument.isTensor() || !is_dtensor(argument.toTensor())) continue;
    const at::Tensor tensor = argument.toTensor();
    argument = static_cast<int>(i) == only_shape ? whole_like(tensor) : whole_value(tensor);
  }
  const auto run_with = call.arguments();
  const OperatorTraits& traits = call.traits();
  auto results = call.run();
  for (const size_t i : traits.written) {
    if (is_dtensor(given[i].toTensor())) keep_part(given[i].toTensor(), run_with[i].toTensor());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& written = traits.returned_argument[i];
    results[i] = written.has_value() ? given[*written] : laid_like(results[i].toTensor(), operands);
  }
  call.finish(std::move(results));
}

// multinomial(): which rows and how many are drawn follows from values; the result is
// whole. Collective as draw_by_values().
void draw_rows(OperatorCall& call, const StrategyKernel*) {
  const at::Tensor self = call.argument(0).toTensor();
  check_in_step(call, self);
  call.argument(0) = whole_value(self);
  auto results = call.run();
  call.finish(replicated_result(results[0].toTensor(), spec_of(self).mesh()));
}

// rrelu_with_noise(self, noise, lower, upper, training): draws where self is negative.
template <bool in_place>
void run_rrelu(OperatorCall& call, const StrategyKernel*) {
  if (call.argument(4).toBool()) return draw_by_values<1>(call, nullptr);
  at::Tensor self = call.argument(0).toTensor();
  const double slope =
      (call.argument(2).toScalar().toDouble() + call.argument(3).toScalar().toDouble()) / 2;
  call.finish(in_place ? at::leaky_relu_(self, slope) : at::leaky_relu(self, slope));
}

// native_dropout(self, p, train): the mask is drawn for the whole, the rest is done on
// parts, as the kernel of the CPU does it. Collective where `self` is Partial.
void run_native_dropout(OperatorCall& call, const StrategyKernel*) {
  const at::Tensor self = reduce_partials(call.argument(0).toTensor());
  check_in_step(call, self);
  const double p = call.argument(1).toDouble();
  const bool drops = call.argument(2).isNone() || call.argument(2).toBool();
  call.argument(0) = whole_like(self);
  auto results = call.run();
  const at::Tensor mask = part_of_drawn(results[1].toTensor(), spec_of(self));
  const at::Tensor local = local_of(self);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  const at::Tensor kept = drops ? local.mul(local_of(mask)).mul_(scale) : local.clone();
  call.finish({make_dtensor(kept, spec_of(mask)), mask});
}

}  // namespace

void add_random(OpTable& table) {
  for (const char* name : {"normal_", "uniform_", "bernoulli_.float", "random_", "exponential_",
                           "cauchy_", "geometric_", "log_normal_"}) {
    table.add(name, {.handler = fill_randomly});
  }
  for (const char* name : {"rand_like", "randn_like", "randint_like", "bernoulli.p"})
    table.add(name, {.handler = draw_like});
  for (const char* name :
       {"bernoulli.", "poisson.", "binomial.", "_standard_gamma.", "_sample_dirichlet.",
        "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"}) {
    table.add(name, {.handler = draw_by_values<kNoArgument>});
  }
  for (const char* name : {"bernoulli_.Tensor", "bernoulli.Tensor"})
    table.add(name, {.handler = draw_by_values<0>});
  table.add("multinomial.", {.handler = draw_rows});
  table.add("rrelu_with_noise.", {.handler = run_rrelu</*in_place=*/false>});
  table.add("rrelu_with_noise_", {.handler = run_rrelu</*in_place=*/true>});
  table.add("rrelu_with_noise_backward.",
            {.handler = [](OperatorCall& call, const StrategyKernel*) { call.decompose(); }});
  table.add("native_dropout.", {.handler = run_native_dropout});
  table.add("native_dropout_backward.", {.strategy = pointwise(Linearity::kProduct)});
}

}  // namespace fsdp::internal
