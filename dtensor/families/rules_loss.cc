// The average of nll_loss: with the batch cut, a sum of losses over a sum of weights,
// both of which are terms, so that uneven parts count as they should.
#include "dtensor/families/rules.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/ways/table.h"

#include <ATen/core/Reduction.h>

namespace fsdp::internal {
namespace {

// nll_loss_forward(self, target, weight, reduction, ignore_index) -> loss, total weight.
// An average is collective where the batch is cut.
void nll_loss_rule(OperatorCall& call) {
  static const WaysKernel by_ways(ways_table().at("nll_loss_forward."), call.handle());
  c10::IValue& reduction = call.argument(3);
  const bool is_average = reduction.toInt() == at::Reduction::Mean;
  if (is_average) reduction = static_cast<int64_t>(at::Reduction::Sum);
  by_ways.run(call);
  if (!is_average) return;
  const at::Tensor sum = reduce_partials(call.result(0).toTensor());
  const at::Tensor total = reduce_partials(call.result(1).toTensor());
  call.finish(std::vector<c10::IValue>{sum.div(total), total});
}

}  // namespace

void add_loss_rules(RuleTable& table) { table["nll_loss_forward."] = nll_loss_rule; }

}  // namespace fsdp::internal
