#include "tests/on_accelerator/device_exclusions.h"

namespace fsdp::testing {
namespace {

// The largest of some numbers is the same in any order.
void clip_by_maximum_norm(Program& program) {
  for (auto& action : program.actions) action.flag |= action.kind == ActionKind::kClip;
}

}  // namespace

const std::vector<Exclusion>& device_exclusions() {
  static const std::vector<Exclusion> all = {
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
