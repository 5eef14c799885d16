// Random numbers: every rank draws the whole tensor and keeps its part, so that the same
// seed gives the same values on any number of ranks. Costs the memory of the whole tensor
// while it runs. Local unless it says otherwise; ranks must share the seed.
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

at::Tensor whole_like(const at::Tensor& self) {
  const DTensorSpec& spec = spec_of(self);
  return at::empty_strided(spec.shape(), spec.stride(), local_of(self).options());
}

// A new DTensor over a copy of this rank's part of `whole`, which lies in memory as that.
at::Tensor part_of_drawn(const at::Tensor& whole, const DTensorSpec& spec) {
  const at::Tensor part = local_part(whole, spec).clone();
  return make_dtensor(part, spec.with_geometry(spec.shape(), whole.strides().vec()));
}

void fill_randomly_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const DTensorSpec& spec = spec_of(self);
  TORCH_CHECK_NOT_IMPLEMENTED(!spec.has_partial(), call.description(),
                              ": random numbers have no Partial form. "
                              "Call .redistribute({Replicate()}) first (collective).");
  call.argument(0) = whole_like(self);
  auto results = call.run();
  local_of(self).copy_(local_part(results[0].toTensor(), spec));
  call.finish(self);
}

// bernoulli(), with probabilities that differ from element to element: every rank needs
// them all. Collective over the mesh dimensions that cut `self`.
void bernoulli_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const DTensorSpec& spec = spec_of(self);
  call.argument(0) = redistribute_local(local_of(self), spec, spec.replicated().placements());
  auto results = call.run();
  call.finish(part_of_drawn(results[0].toTensor(), spec.without_partials()));
}

// multinomial(): which rows and how many are drawn follows from values, so every rank
// draws from the whole. Collective as bernoulli_rule().
void draw_from_whole_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const DTensorSpec& spec = spec_of(self);
  call.argument(0) = redistribute_local(local_of(self), spec, spec.replicated().placements());
  auto results = call.run();
  const at::Tensor drawn = results[0].toTensor();
  call.finish(make_dtensor(drawn, DTensorSpec(spec.mesh(), spec.replicated().placements(),
                                              drawn.sizes().vec(), drawn.strides().vec())));
}

void random_like_rule(OperatorCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  call.argument(0) = whole_like(self);
  auto results = call.run();
  call.finish(part_of_drawn(results[0].toTensor(), spec_of(self).without_partials()));
}

}  // namespace

void add_random_rules(RuleTable& table) {
  for (const char* name : {"normal_", "uniform_", "bernoulli_.float", "random_", "exponential_",
                           "cauchy_", "geometric_", "log_normal_"}) {
    table[name] = fill_randomly_rule;
  }
  table["bernoulli."] = bernoulli_rule;
  table["multinomial"] = draw_from_whole_rule;
  for (const char* name : {"rand_like", "randn_like", "randint_like"})
    table[name] = random_like_rule;
}

}  // namespace fsdp::internal
