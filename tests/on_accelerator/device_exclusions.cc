#include "tests/on_accelerator/device_exclusions.h"

#include "tests/fully_shard/random_programs/program_traits.h"

#include <algorithm>

namespace fsdp::testing {
namespace {

bool has_16_bits(Dtype dtype) { return dtype == Dtype::kBFloat16 || dtype == Dtype::kHalf; }

using VisitNodeOfUnit = std::function<void(UnitSpec& unit, Node& node)>;

void visit_below(Node& node, UnitSpec* unit, const VisitNodeOfUnit& visit) {
  if (unit != nullptr) visit(*unit, node);
  UnitSpec* joined = nullptr;
  for (auto& child : node.children) {
    if (child.is_unit && !child.joins_previous) joined = &child.unit;
    visit_below(child, child.is_unit ? joined : unit, visit);
  }
}

// All nodes that a unit has.
void for_each_node_of_unit(Program& program, const VisitNodeOfUnit& visit) {
  visit_below(program.root, program.root.is_unit ? &program.root.unit : nullptr, visit);
}

bool throws(const Program& program) {
  return std::any_of(program.actions.begin(), program.actions.end(), [](const Action& action) {
    return action.kind == ActionKind::kThrowInForward ||
           action.kind == ActionKind::kThrowInBackward;
  });
}

// Whether a unit has just what is in this child, and nothing that is used elsewhere.
bool is_unit_alone(const Node& parent, size_t child) {
  const auto next = child + 1;
  const bool is_joined = next < parent.children.size() && parent.children[next].joins_previous;
  return parent.children[child].is_unit && !parent.children[child].joins_previous && !is_joined;
}

// Whole units only may be skipped, where no forward that was dropped owes a reduction.
void skip_whole_units(const Program& program, Node& node, bool may_skip) {
  for (size_t i = 0; i < node.children.size(); ++i) {
    auto& child = node.children[i];
    if (!may_skip || !is_unit_alone(node, i)) child.conditional = child.no_grad = false;
    skip_whole_units(program, child, may_skip && !child.checkpoint);
  }
}

void use_all_parameters(Program& program) {
  for_each_node(program.root, [](Node& node) {
    for (auto& param : node.params)
      param.penalised |= param.use == Use::kUnused || param.use == Use::kNoGrad;
  });
  skip_whole_units(program, program.root,
                   !throws(program) && !has_tie(program, /*across_units=*/true));
}

void reduce_in_32_bits(Program& program) {
  for_each_node_of_unit(program, [](UnitSpec& unit, Node& node) {
    for (const auto& param : node.params) {
      if (has_16_bits(reduced_in(unit.precision, param.dtype)))
        unit.precision.reduce_dtype = Dtype::kFloat;
    }
  });
}

// The largest of some numbers is the same in any order.
void clip_by_maximum_norm(Program& program) {
  for (auto& action : program.actions) action.flag |= action.kind == ActionKind::kClip;
}

}  // namespace

const std::vector<Exclusion>& device_exclusions() {
  static const std::vector<Exclusion> all = {
      {.feature = "a parameter that gets no gradient in a backward that reduces its unit",
       .reason = "rows have no flags where the host can not read them (Transport::reads_flags), "
                 "so .grad becomes zeros, where it stays undefined on the CPU",
       .leave_out = use_all_parameters},
      {.feature = "gradients that are reduced in 16 bits",
       .reason = "the sums are rounded to 16 bits, as NCCL does, and on the CPU they are not",
       .leave_out = reduce_in_32_bits},
      {.feature = "clip_grad_norm_ by the 2-norm",
       .reason = "the terms are added at once, and on the CPU one by one",
       .leave_out = clip_by_maximum_norm},
  };
  return all;
}

Program generate_for_devices(uint64_t seed) {
  auto program = generate(seed);
  for (const auto& exclusion : device_exclusions()) exclusion.leave_out(program);
  return program;
}

}  // namespace fsdp::testing
