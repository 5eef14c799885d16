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
