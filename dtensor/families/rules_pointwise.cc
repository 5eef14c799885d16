// Elementwise operators of which a number decides what they may do with terms.
#include "dtensor/families/rules.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/ways/pointwise_ways.h"
#include "dtensor/ways/table.h"

#include <iterator>
#include <utility>

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

constexpr const char* kWithNumber[] = {"add.Scalar", "add_.Scalar", "sub.Scalar", "sub_.Scalar",
                                       "rsub.Scalar"};

// add(self, number, alpha): to terms the number is one term more, as a tensor would be,
// which is what the composite kernel makes of it.
template <size_t kind>
void add_number_rule(OperatorCall& call) {
  static const WaysKernel by_ways(*find_ways(kWithNumber[kind]), call.handle());
  if (spec_of(call.argument(0).toTensor()).has_partial()) return call.decompose();
  by_ways.run(call);
}

template <size_t... kinds>
void add_number_rules(RuleTable& table, std::index_sequence<kinds...>) {
  ((table[kWithNumber[kinds]] = add_number_rule<kinds>), ...);
}

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  table["masked_fill.Scalar"] = masked_fill_rule</*in_place=*/false>;
  table["masked_fill_.Scalar"] = masked_fill_rule</*in_place=*/true>;
  add_number_rules(table, std::make_index_sequence<std::size(kWithNumber)>());
}

}  // namespace fsdp::internal
