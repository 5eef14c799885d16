// Elementwise operators of which a number decides what they may do with terms.
#include "dtensor/families/rules.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/ways/pointwise_ways.h"

namespace fsdp::internal {
namespace {

// masked_fill(self, mask, value): zeros can be filled in term by term.
template <bool in_place>
void masked_fill_rule(OperatorCall& call) {
  static const WaysKernel zeros(pointwise(Linearity::kScale), call.handle());
  static const WaysKernel others(pointwise(Linearity::kNone), call.handle());
  const bool fills_zero = call.argument(2).toScalar().equal(0);
  (fills_zero ? zeros : others).run(call);
}

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  table["masked_fill.Scalar"] = masked_fill_rule</*in_place=*/false>;
  table["masked_fill_.Scalar"] = masked_fill_rule</*in_place=*/true>;
}

}  // namespace fsdp::internal
