// nll_loss with the batch cut: sums are added up, single losses stay where they are. The
// average divides one sum by another (rules_loss.cc).
#include "dtensor/ways/table.h"

namespace fsdp::internal {
namespace {

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };  // as at::Reduction

bool has_batch(const Operand& self) { return self.ndim() == 2; }

// nll_loss_forward(self, target, weight, reduction, ignore_index) -> loss, total weight,
// which is 0 where nothing is reduced.
std::vector<Way> nll_loss_ways(const CallGeometry& call) {
  if (!has_batch(call.operands[0])) return {};
  const Placement whole = Replicate{};
  const std::vector<Placement> batch{Shard{0}, Shard{0}, whole};
  switch (call.number(3)) {
    case kNone:
      return {{{Shard{0}, whole}, batch}};
    case kSum:
      return {{{Partial{}, Partial{}}, batch}};
    default:
      return {};
  }
}

// nll_loss_backward(grad, self, target, weight, reduction, ignore_index, total_weight).
std::vector<Way> nll_loss_backward_ways(const CallGeometry& call) {
  if (!has_batch(call.operands[1])) return {};
  const Placement whole = Replicate{};
  const Placement batch = Shard{0};
  const Placement grad = call.number(4) == kNone ? batch : whole;
  return {{{batch}, {grad, batch, batch, whole, whole}}};
}

}  // namespace

void add_loss_ways(WaysTable& table) {
  table["nll_loss_forward."] = {.ways = nll_loss_ways};
  table["nll_loss_backward."] = {.ways = nll_loss_backward_ways};
}

}  // namespace fsdp::internal
