// Variances. Over a cut dimension in two passes: the mean, of which every rank needs the
// whole (collective), then the squared distances, of which each rank adds up its own.
#include "dtensor/families/reduction.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/redistribute.h"

#include <ATen/ops/mean.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

double correction_of(OperatorCall& call) {
  const c10::IValue* correction = call.find_argument("correction");
  return correction->isNone() ? 1.0 : correction->toScalar().toDouble();
}

struct Moments {
  at::Tensor mean;
  at::Tensor variance;
};

// Collective.
Moments moments(const OperatorCall& call, const at::Tensor& self, const ReducedDims& dims,
                double correction) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !self.is_complex(), call.description(),
      ": complex numbers over a dimension that is cut "
      "across ranks. Call .redistribute({Replicate()}) first (collective).");
  const at::Tensor mean = reduce_partials(at::mean(self, dims.dims, /*keepdim=*/true));
  const at::Tensor squares =
      reduce_partials(at::sum(self.sub(mean).square(), dims.dims, dims.keepdim));
  const double count = std::max(0.0, static_cast<double>(dims.count(self.sizes())) - correction);
  return {.mean = mean.view(squares.sizes()), .variance = squares.div(count)};
}

// var, std, var_mean and std_mean.
template <bool is_std, bool with_mean>
void variance_rule(OperatorCall& call) {
  const at::Tensor self = reduce_partials(call.argument(0).toTensor());
  const auto dims = ReducedDims::of(call, self);
  if (!crosses_ranks(spec_of(self), dims)) {
    call.argument(0) = local_of(self);
    auto results = call.run();
    const auto spec = reduced_spec(spec_of(self), dims, Replicate{});
    for (auto& result : results) result = make_dtensor(result.toTensor(), spec);
    return call.finish(std::move(results));
  }
  const auto [mean, variance] = moments(call, self, dims, correction_of(call));
  std::vector<c10::IValue> results{is_std ? variance.sqrt() : variance};
  if (with_mean) results.emplace_back(mean);
  call.finish(std::move(results));
}

}  // namespace

void add_variance_rules(RuleTable& table) {
  table["var.correction"] = variance_rule<false, false>;
  table["std.correction"] = variance_rule<true, false>;
  table["var_mean.correction"] = variance_rule<false, true>;
  table["std_mean.correction"] = variance_rule<true, true>;
}

}  // namespace fsdp::internal
