// A tensor made from a DTensor lies as that does and stays on its device type.
#include "dtensor/layout/shard_layout.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/eye.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::internal {
namespace {

// Terms need not be added up to make something new.
std::vector<PlacementStrategy> strategies_from_terms() {
  std::vector<PlacementStrategy> strategies;
  using Op = Partial::Op;
  for (const Op op : {Op::kSum, Op::kAvg, Op::kMin, Op::kMax, Op::kProduct})
    strategies.push_back({.results = {Replicate{}}, .operands = {Partial{op}}});
  return strategies;
}

// zeros_like and its like.
std::vector<PlacementStrategy> like_strategy(const OpSchema& call) {
  auto strategies = strategies_from_terms();
  for (int64_t d = 0; d < call.operands[0].ndim(); ++d)
    strategies.push_back({.results = {Shard{d}}, .operands = {Shard{d}}});
  return strategies;
}

// new_zeros(self, size, ...): as self where that is cut along dimensions that both have,
// else whole.
std::vector<PlacementStrategy> new_strategy(const OpSchema& call) {
  const Operand& self = call.operands[0];
  const auto& size = call.numbers(1);
  auto strategies = strategies_from_terms();
  for (int64_t d = 0; d < self.ndim(); ++d) {
    const bool have_both =
        size.size() == self.shape.size() && size[static_cast<size_t>(d)] == self.size(d);
    strategies.push_back(
        {.results = {have_both ? Placement(Shard{d}) : Replicate{}}, .operands = {Shard{d}}});
  }
  return strategies;
}

std::vector<ResultGeometry> new_results(const OpSchema& call) {
  return {contiguous(call.numbers(1))};
}
std::vector<PartArgument> new_part(const OpSchema&, const PlacedCall& placed) {
  return {{1, placed.results[0].local_shape(placed.coordinate)}};
}

// new_empty_strided(self, size, stride, ...)
std::vector<ResultGeometry> new_strided_results(const OpSchema& call) {
  return {{.shape = call.numbers(1), .stride = call.numbers(2)}};
}
std::vector<PartArgument> new_strided_part(const OpSchema&, const PlacedCall& placed) {
  const TensorLayout& whole = placed.results[0];
  auto shape = whole.local_shape(placed.coordinate);
  auto stride = shape == whole.shape() ? whole.stride() : dense_strides(shape, whole.stride());
  return {{1, std::move(shape)}, {2, std::move(stride)}};
}

// eye(n, m, out) into a DTensor of that shape (nn::init::eye_): this rank's part of it.
void write_eye(OperatorCall& call, const StrategyKernel*) {
  const at::Tensor out = call.argument(call.argument_count() - 1).toTensor();
  const DTensorSpec& spec = spec_of(out);
  const int64_t rows = call.argument(0).toInt();
  const int64_t columns = call.argument_count() == 3 ? call.argument(1).toInt() : rows;
  TORCH_CHECK_VALUE(out.sizes() == at::IntArrayRef({rows, columns}), call.description(),
                    ": out: expected shape ", at::IntArrayRef({rows, columns}),
                    "; a DTensor keeps its shape (rank ", spec.mesh().rank(), ")");
  local_of(out).copy_(placed_whole(at::eye(rows, columns, local_of(out).options()), spec));
  call.finish(out);
}

}  // namespace

void add_factory(OpTable& table) {
  for (const char* name : {"empty_like.", "zeros_like.", "ones_like.", "full_like."})
    table.add(name, {.strategy = {.strategies = like_strategy}});
  for (const char* name : {"new_empty.", "new_zeros.", "new_ones.", "new_full."}) {
    table.add(name, {.strategy = {.strategies = new_strategy,
                                  .results = new_results,
                                  .part_arguments = new_part}});
  }
  table.add("new_empty_strided.", {.strategy = {.strategies = new_strategy,
                                                .results = new_strided_results,
                                                .part_arguments = new_strided_part}});
  for (const char* name : {"eye.out", "eye.m_out"}) table.add(name, {.handler = write_eye});
}

}  // namespace fsdp::internal
