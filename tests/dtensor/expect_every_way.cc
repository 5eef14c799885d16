#include "tests/dtensor/expect_every_way.h"

#include "dtensor/internal/meta_results.h"
#include "dtensor/internal/operands.h"
#include "dtensor/internal/place_operands.h"
#include "dtensor/internal/shard_layout.h"
#include "dtensor/ways/table.h"
#include "tests/dtensor/partial_values.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using namespace internal;
using Arguments = torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

// An operator by its name in the table, with plain arguments.
class PlainCall {
 public:
  PlainCall(const std::string& name, Arguments arguments)
      : op_(find(name)), kinds_(op_.schema()), arguments_(std::move(arguments)) {
    const auto& declared = op_.schema().arguments();
    for (size_t i = arguments_.size(); i < declared.size(); ++i) {
      arguments_.push_back(*declared[i].default_value());
    }
  }

  Tensors operands() {
    const auto operands = kinds_.operands_of(as_call(arguments_));
    return {operands.begin(), operands.end()};
  }

  CallGeometry geometry(int64_t parts) {
    CallGeometry geometry{.operands = geometry_of(operands()),
                          .plain = kinds_.plain_of(as_call(arguments_)),
                          .parts = parts};
    return geometry;
  }

  Tensors run() { return run(operands()); }

  Tensors run(const Tensors& operands) {
    Arguments stack = arguments_;
    OperatorCall call = as_call(stack);
    Tensors own;  // the operator may write
    for (const at::Tensor& operand : operands)
      own.push_back(operand.defined() ? operand.clone() : operand);
    kinds_.replace_operands(call, own);
    op_.callBoxed(&stack);
    Tensors results;
    for (const c10::IValue& result : stack) results.push_back(result.toTensor());
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

// What each of `parts` ranks has of `whole`.
Tensors split(const at::Tensor& whole, const Placement& placement, int64_t parts) {
  Tensors pieces(static_cast<size_t>(parts), whole);
  if (!whole.defined()) return pieces;
  if (placement.is_partial()) return terms_of(whole, placement.partial_op(), parts);
  for (int64_t i = 0; i < parts && placement.is_shard(); ++i) {
    const int64_t dim = placement.shard_dim();
    const Chunk chunk = chunk_of(whole.size(dim), parts, i);
    pieces[static_cast<size_t>(i)] = whole.narrow(dim, chunk.offset, chunk.length).clone();
  }
  return pieces;
}

at::Tensor join(const Tensors& pieces, const Placement& placement) {
  if (!pieces[0].defined()) return {};
  if (placement.is_shard()) return at::cat(pieces, placement.shard_dim());
  if (placement.is_partial()) return reduced(pieces, placement.partial_op());
  for (const at::Tensor& piece : pieces) EXPECT_TRUE(piece.allclose(pieces[0]));
  return pieces[0];
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_EQ(actual.defined(), expected.defined());
  if (!actual.defined()) return;
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(actual.sizes() == expected.sizes() && actual.allclose(expected, 1e-9, 1e-9, /*equal_nan=*/true));
}

void expect_exact(PlainCall& call, const Way& way, int64_t parts) {
  SCOPED_TRACE(to_string(way) + " in " + std::to_string(parts) + " parts");
  const Tensors expected = call.run();
  const Tensors wholes = call.operands();
  ASSERT_EQ(way.operands.size(), wholes.size());
  ASSERT_EQ(way.results.size(), expected.size());
  std::vector<Tensors> operands(static_cast<size_t>(parts));  // by rank
  for (size_t i = 0; i < wholes.size(); ++i) {
    const Tensors pieces = split(wholes[i], way.operands[i], parts);
    for (size_t r = 0; r < pieces.size(); ++r) operands[r].push_back(pieces[r]);
  }
  std::vector<Tensors> results(expected.size());  // by result
  for (const Tensors& own : operands) {
    const Tensors locals = call.run(own);
    for (size_t i = 0; i < locals.size(); ++i) results[i].push_back(locals[i]);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    expect_close(join(results[i], way.results[i]), expected[i]);
  }
}

void expect_geometry(PlainCall& call, const OperatorWays& ways) {
  const auto geometry = ways.results ? ways.results(call.geometry(1)) : call.results_by_meta();
  const Tensors results = call.run();
  ASSERT_EQ(geometry.size(), results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    EXPECT_EQ(results[i].sizes(), at::IntArrayRef(geometry[i].shape)) << "result " << i;
    EXPECT_EQ(results[i].strides(), at::IntArrayRef(geometry[i].stride)) << "result " << i;
  }
}

std::set<std::string>& checked() {
  static std::set<std::string> names;
  return names;
}

}  // namespace

void expect_every_way(const std::string& name, const torch::jit::Stack& arguments) {
  SCOPED_TRACE(name);
  PlainCall call(name, arguments);
  const OperatorWays* const found = find_ways(name);
  ASSERT_NE(found, nullptr);
  const OperatorWays& ways = *found;
  checked().insert(name);
  checked().insert(name.substr(0, name.find('.')));  // as the table has those for all overloads
  expect_geometry(call, ways);
  for (int64_t parts = 1; parts <= 4; ++parts) {
    for (const Way& way : ways.ways(call.geometry(parts))) expect_exact(call, way, parts);
  }
}

const std::set<std::string>& checked_operators() { return checked(); }

}  // namespace fsdp::testing
