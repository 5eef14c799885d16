#include "tests/dtensor/ops/expect_every_strategy.h"

#include "device_mesh/process_group.h"
#include "dtensor/dispatch/local_tensors.h"
#include "dtensor/dispatch/operands.h"
#include "dtensor/dispatch/sharding_propagator.h"
#include "dtensor/layout/shard_layout.h"
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/propagate.h"
#include "tests/dtensor/partial_values.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

namespace fsdp::testing {
namespace {

using namespace internal;
using Arguments = torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

struct PlacementOrder {
  bool operator()(const Placement& a, const Placement& b) const {
    return to_string(a) < to_string(b);
  }
};

// An operator by its name in the table, with plain arguments.
class PlainCall {
 public:
  PlainCall(const std::string& name, Arguments arguments)
      : op_(find(name)),
        kinds_(op_.schema(), op_table().find(name)->strategy.reals),
        arguments_(std::move(arguments)) {
    const auto& declared = op_.schema().arguments();
    for (size_t i = arguments_.size(); i < declared.size(); ++i) {
      arguments_.push_back(*declared[i].default_value());
    }
  }

  // Those of new_empty are any.
  bool has_values() const { return op_.operator_name().name.find("empty") == std::string::npos; }

  Tensors operands() {
    const auto operands = kinds_.operands_of(as_call(arguments_));
    return {operands.begin(), operands.end()};
  }

  // With every operand as `arriving` along the one mesh dimension.
  OpSchema geometry(int64_t parts, const Placement& arriving = Replicate{}) {
    const Tensors all = operands();
    return {.operands = geometry_of(all),
            .plain = kinds_.plain_of(as_call(arguments_)),
            .parts = parts,
            .arriving = std::vector<Placement>(all.size(), arriving),
            .ranks = parts};
  }

  Tensors run() {
    return run(operands(), {}, [](OperatorCall& call) { call.run_in_place(); });
  }

  // On other operands, by `how`, which finishes the call.
  Tensors run(const Tensors& operands, const std::vector<PartArgument>& part_arguments,
              const std::function<void(OperatorCall&)>& how) {
    Arguments stack = arguments_;
    for (const auto& [place, value] : part_arguments) {
      if (const auto* const numbers = std::get_if<std::vector<int64_t>>(&value))
        stack[place] = *numbers;
      else
        stack[place] = std::get<int64_t>(value);
    }
    OperatorCall call = as_call(stack);
    Tensors own;  // the operator may write
    for (const at::Tensor& operand : operands)
      own.push_back(operand.defined() ? operand.clone() : operand);
    kinds_.replace_operands(call, own);
    how(call);
    Tensors results;
    for (const c10::IValue& result : stack) {
      if (result.isTensor()) results.push_back(result.toTensor());
      if (result.isTensorList())
        for (const at::Tensor& each : result.toTensorVector()) results.push_back(each);
    }
    return results;
  }

  std::vector<ResultGeometry> results_by_meta() {
    return meta_results(as_call(arguments_), kinds_);
  }

 private:
  static c10::OperatorHandle find(const std::string& name) {
    const auto dot = name.find('.');
    return c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name.substr(0, dot)).c_str(),
                                                          name.substr(dot + 1).c_str());
  }

  OperatorCall as_call(Arguments& stack) { return {op_, traits_, {}, &stack}; }

  c10::OperatorHandle op_;
  OperatorTraits traits_{op_};
  ArgumentKinds kinds_;
  Arguments arguments_;
};

// The first of a list of terms, of which `others` are all but it.
at::Tensor first_term(const at::Tensor& whole, Partial::Op op, const Tensors& others) {
  const auto parts = static_cast<double>(others.size() + 1);
  at::Tensor first = op == Partial::Op::kAvg ? whole * parts : whole.clone();
  for (const at::Tensor& other : others) {
    if (op == Partial::Op::kSum || op == Partial::Op::kAvg) first = first - other;
    if (op == Partial::Op::kProduct) first = first / other;
  }
  return first;
}

// A term that leaves the first one what it is where terms do not add up.
at::Tensor other_term(const at::Tensor& whole, Partial::Op op) {
  const at::Tensor random = at::rand_like(whole) + 0.5;
  if (op == Partial::Op::kMin) return whole + random;
  if (op == Partial::Op::kMax) return whole - random;
  return random;
}

Tensors terms_of(const at::Tensor& whole, Partial::Op op, int64_t parts) {
  Tensors terms;
  for (int64_t i = 1; i < parts; ++i) terms.push_back(other_term(whole, op));
  terms.insert(terms.begin(), first_term(whole, op, terms));
  return terms;
}

// Which elements of the dimension rank `rank` has.
at::Tensor elements_of(const Shard& cut, int64_t size, int64_t parts, int64_t rank) {
  const Chunk own = chunk_of(atoms_of(cut, size), parts, rank);
  return at::arange(size)
      .view({cut.outer, -1, cut.unit})
      .narrow(1, own.offset, own.length)
      .flatten();
}

// What each of `parts` ranks has of `whole`.
Tensors split(const at::Tensor& whole, const Placement& placement, int64_t parts) {
  Tensors pieces(static_cast<size_t>(parts), whole);
  if (!whole.defined()) return pieces;
  if (placement.is_partial()) return terms_of(whole, placement.partial_op(), parts);
  for (int64_t i = 0; i < parts && placement.is_shard(); ++i) {
    const int64_t dim = placement.shard_dim();
    const auto own = elements_of(placement.shard(), whole.size(dim), parts, i);
    pieces[static_cast<size_t>(i)] = whole.index_select(dim, own);
  }
  return pieces;
}

at::Tensor join(const Tensors& pieces, const Placement& placement, bool has_values) {
  if (!pieces[0].defined()) return {};
  if (placement.is_partial()) return reduced(pieces, placement.partial_op());
  if (placement.is_replicate()) {
    for (const at::Tensor& piece : pieces)
      EXPECT_TRUE(!has_values || piece.allclose(pieces[0], 1e-9, 1e-9, /*equal_nan=*/true));
    return pieces[0];
  }
  const int64_t dim = placement.shard_dim();
  const at::Tensor all = at::cat(pieces, dim);
  at::Tensor whole = at::empty_like(all);
  int64_t start = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto own = elements_of(placement.shard(), all.size(dim),
                                 static_cast<int64_t>(pieces.size()), static_cast<int64_t>(i));
    EXPECT_EQ(own.numel(), pieces[i].size(dim));
    if (own.numel() == pieces[i].size(dim)) whole.index_copy_(dim, own, pieces[i]);
    start += own.numel();
  }
  return whole;
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, bool has_values) {
  ASSERT_EQ(actual.defined(), expected.defined());
  if (!actual.defined()) return;
  EXPECT_EQ(actual.sizes(), expected.sizes());
  if (!has_values) return;
  EXPECT_TRUE(actual.sizes() == expected.sizes() &&
              actual.allclose(expected, 1e-9, 1e-9, /*equal_nan=*/true));
}

// A plain layout on a mesh of one dimension. Of what is absent, any.
TensorLayout layout_of(const at::Tensor& whole, const Placement& placement, int64_t parts) {
  if (!whole.defined()) return TensorLayout({{parts}, {Replicate{}}, {}, {}});
  return TensorLayout({{parts}, {placement}, whole.sizes().vec(), whole.strides().vec()});
}

std::vector<TensorLayout> layouts_of(const Tensors& wholes,
                                     const std::vector<Placement>& placements, int64_t parts) {
  std::vector<TensorLayout> layouts;
  for (size_t i = 0; i < wholes.size(); ++i)
    layouts.push_back(layout_of(wholes[i], placements[i], parts));
  return layouts;
}

// One rank's, of as many as there are parts. Nothing is sent on it.
DeviceMesh mesh_of_rank(int64_t parts, int64_t rank) {
  init_process_group({.backend = "fake", .rank = rank, .world_size = parts});
  DeviceMesh mesh = init_device_mesh(c10::kCPU, {parts});
  destroy_process_group();
  return mesh;
}

// What a rank that holds the operands `own` gives.
Tensors run_on_rank(PlainCall& call, const OpEntry& entry, const PlacedCall& placed,
                    const Tensors& own, int64_t parts) {
  const auto arguments = entry.strategy.part_arguments
                             ? entry.strategy.part_arguments(call.geometry(parts), placed)
                             : std::vector<PartArgument>{};
  if (entry.local_kernel == nullptr)
    return call.run(own, arguments, [](OperatorCall& each) { each.run_in_place(); });
  const OutputSharding plan{.results = placed.results, .placed = placed.operands};
  const DeviceMesh mesh = mesh_of_rank(parts, placed.coordinate[0]);
  return call.run(own, arguments, [&](OperatorCall& each) {
    each.finish(entry.local_kernel(each, PlacedOnMesh(mesh, plan)));
  });
}

void expect_exact(PlainCall& call, const OpEntry& entry, const PlacementStrategy& strategy,
                  int64_t parts) {
  SCOPED_TRACE(to_string(strategy) + " in " + std::to_string(parts) + " parts");
  const Tensors expected = call.run();
  const Tensors wholes = call.operands();
  ASSERT_EQ(strategy.operands.size(), wholes.size());
  ASSERT_EQ(strategy.results.size(), expected.size());
  std::vector<Tensors> operands(static_cast<size_t>(parts));  // by rank
  for (size_t i = 0; i < wholes.size(); ++i) {
    const Tensors pieces = split(wholes[i], strategy.operands[i], parts);
    for (size_t r = 0; r < pieces.size(); ++r) operands[r].push_back(pieces[r]);
  }
  std::vector<Tensors> results(expected.size());  // by result
  for (size_t r = 0; r < operands.size(); ++r) {
    const PlacedCall placed{.operands = layouts_of(wholes, strategy.operands, parts),
                            .results = layouts_of(expected, strategy.results, parts),
                            .coordinate = {static_cast<int64_t>(r)}};
    const Tensors locals = run_on_rank(call, entry, placed, operands[r], parts);
    ASSERT_EQ(locals.size(), results.size());
    for (size_t i = 0; i < locals.size(); ++i) results[i].push_back(locals[i]);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    expect_close(join(results[i], strategy.results[i], call.has_values()), expected[i],
                 call.has_values());
  }
}

// What kernels of other devices give: statistics of a batch norm in evaluation.
bool is_left_out(const at::Tensor& result) { return result.dim() == 1 && result.numel() == 0; }

void expect_geometry(PlainCall& call, const OpStrategy& strategy) {
  const auto geometry =
      strategy.results ? strategy.results(call.geometry(1)) : call.results_by_meta();
  const Tensors results = call.run();
  ASSERT_EQ(geometry.size(), results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined() || is_left_out(results[i])) continue;
    EXPECT_EQ(results[i].sizes(), at::IntArrayRef(geometry[i].shape)) << "result " << i;
    EXPECT_EQ(results[i].strides(), at::IntArrayRef(geometry[i].stride)) << "result " << i;
  }
}

// Every cut of a dimension of some operand, in blocks and of atoms too, and none.
std::set<Placement, PlacementOrder> arrivals_of(PlainCall& call) {
  std::set<Placement, PlacementOrder> arrivals{Replicate{}};
  for (const at::Tensor& operand : call.operands()) {
    for (int64_t d = 0; operand.defined() && d < operand.dim(); ++d) {
      for (const int64_t outer : {1, 2, 3}) {
        for (const int64_t unit : {1, 2}) {
          if (operand.size(d) > 0 && operand.size(d) % (outer * unit) == 0)
            arrivals.insert(Shard{d, outer, unit});
        }
      }
    }
  }
  return arrivals;
}

bool fit(const std::vector<Placement>& placements, const Tensors& wholes) {
  for (size_t i = 0; i < wholes.size(); ++i) {
    if (!wholes[i].defined() || !placements[i].is_shard()) continue;
    const Shard& cut = placements[i].shard();
    if (cut.dim >= wholes[i].dim() || wholes[i].size(cut.dim) % (cut.outer * cut.unit) != 0)
      return false;
  }
  return true;
}

// Where operands arrive so, but for what asks other ranks, which is tried on ranks
// (strategies_on_ranks_test.cc). What decides for all mesh dimensions at once is asked
// for one.
std::vector<PlacementStrategy> strategies_of(PlainCall& call, const OpStrategy& strategy,
                                             int64_t parts, const Placement& arriving) {
  const auto geometry = call.geometry(parts, arriving);
  if (!fit(geometry.arriving, call.operands())) return {};
  if (!strategy.propagation) {
    auto all = without_empty_parts(
        with_interleaved_strategies(strategy.strategies(geometry), geometry), geometry);
    std::erase_if(all, [](const PlacementStrategy& strategy) { return strategy.asks_other_ranks; });
    return all;
  }
  const auto chosen = strategy.propagation(geometry, {{parts}, {{arriving}}});
  return {{.results = {chosen.results[0][0]}, .operands = {chosen.operands[0][0]}}};
}

std::set<std::string>& checked() {
  static std::set<std::string> names;
  return names;
}

}  // namespace

void expect_every_strategy(const std::string& name, const torch::jit::Stack& arguments) {
  SCOPED_TRACE(name);
  PlainCall call(name, arguments);
  const OpEntry& entry = *op_table().find(name);
  checked().insert(name);
  checked().insert(name.substr(0, name.find('.')));  // as the table has those for all overloads
  expect_geometry(call, entry.strategy);
  for (int64_t parts = 1; parts <= 4; ++parts) {
    std::set<std::string> tried;
    for (const Placement& arriving : arrivals_of(call)) {
      for (const PlacementStrategy& strategy :
           strategies_of(call, entry.strategy, parts, arriving)) {
        if (tried.insert(to_string(strategy)).second) expect_exact(call, entry, strategy, parts);
      }
    }
  }
}

const std::set<std::string>& checked_operators() { return checked(); }

}  // namespace fsdp::testing
