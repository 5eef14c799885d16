// nll_loss with the batch cut, or a dimension of the image of nll_loss2d: sums are added
// up, single losses stay where they are. The average divides one sum by another
// (families/rules_loss.cc).
#include "dtensor/ways/table.h"

namespace fsdp::internal {
namespace {

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };  // as at::Reduction

// Operand `self` is [batch, classes, ...], its targets [batch, ...]; one without a batch
// is [classes].
bool has_batch(const Operand& self) { return self.ndim() >= 2; }

// The dimension of self that is dimension `dim` of the targets.
int64_t dim_of_self(int64_t dim) { return dim == 0 ? 0 : dim + 1; }

// nll_loss_forward(self, target, weight, reduction, ignore_index) -> loss, total weight,
// which is 0 where nothing is reduced.
std::vector<Way> nll_loss_ways(const CallGeometry& call) {
  if (!has_batch(call.operands[0]) || call.number(3) == kMean) return {};
  const Placement whole = Replicate{};
  const bool is_reduced = call.number(3) == kSum;
  std::vector<Way> ways;
  for (int64_t d = 0; d < call.operands[1].ndim(); ++d) {
    const Placement loss = is_reduced ? Placement(Partial{}) : Shard{d};
    ways.push_back({{loss, is_reduced ? Placement(Partial{}) : whole},
                    {Shard{dim_of_self(d)}, Shard{d}, whole}});
  }
  return ways;
}

std::vector<ResultGeometry> nll_loss_results(const CallGeometry& call) {
  const bool is_reduced = call.number(3) != kNone;
  return {contiguous(is_reduced ? std::vector<int64_t>{} : call.operands[1].shape), contiguous({})};
}

// nll_loss_backward(grad, self, target, weight, reduction, ignore_index, total_weight).
std::vector<Way> nll_loss_backward_ways(const CallGeometry& call) {
  if (!has_batch(call.operands[1])) return {};
  const Placement whole = Replicate{};
  std::vector<Way> ways;
  for (int64_t d = 0; d < call.operands[2].ndim(); ++d) {
    const Placement cut = Shard{dim_of_self(d)}, target = Shard{d};
    ways.push_back({{cut}, {call.number(4) == kNone ? target : whole, cut, target, whole, whole}});
  }
  return ways;
}

std::vector<ResultGeometry> nll_loss_backward_results(const CallGeometry& call) {
  return {laid_as(call.operands[1].shape, call.operands[1].stride)};
}

}  // namespace

void add_loss_ways(WaysTable& table) {
  for (const char* name : {"nll_loss_forward.", "nll_loss2d_forward."})
    table[name] = {.ways = nll_loss_ways, .results = nll_loss_results};
  for (const char* name : {"nll_loss_backward.", "nll_loss2d_backward."})
    table[name] = {.ways = nll_loss_backward_ways, .results = nll_loss_backward_results};
}

}  // namespace fsdp::internal
