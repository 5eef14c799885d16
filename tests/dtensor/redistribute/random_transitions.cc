#include "tests/dtensor/redistribute/random_transitions.h"

#include "tests/dtensor/partial_values.h"
#include "tests/dtensor/random_cuts.h"
#include "tests/support/thread_ranks.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/accumulate.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <utility>

namespace fsdp::testing {
namespace {

std::vector<Placement> random_placements(std::mt19937& random, int64_t mesh_ndim, int64_t ndim) {
  const auto choices = every_placement(ndim);
  for (;;) {
    std::vector<Placement> placements;
    for (int64_t m = 0; m < mesh_ndim; ++m)
      placements.push_back(choices[random() % choices.size()]);
    if (commute(placements)) return placements;
  }
}

Transition random_transition(std::mt19937& random, const std::vector<int64_t>& mesh_shape) {
  std::vector<int64_t> shape(1 + random() % 3);
  for (auto& size : shape) size = static_cast<int64_t>(random() % 10);
  const auto draw = [&] {
    return with_random_cuts(random_placements(random, static_cast<int64_t>(mesh_shape.size()),
                                              static_cast<int64_t>(shape.size())),
                            shape, mesh_shape, random);
  };
  auto from = draw(), to = draw();
  return {std::move(from), std::move(to), std::move(shape), random()};
}

}  // namespace

bool is_linear(const Placement& placement) {
  return !placement.is_partial() || placement.partial_op() == Partial::Op::kSum ||
         placement.partial_op() == Partial::Op::kAvg;
}

bool commute(const std::vector<Placement>& placements) {
  std::vector<Placement> partials;
  std::copy_if(placements.begin(), placements.end(), std::back_inserter(partials),
               [](const auto& placement) { return placement.is_partial(); });
  return std::all_of(partials.begin(), partials.end(), is_linear) ||
         std::all_of(partials.begin(), partials.end(),
                     [&](const auto& p) { return p == partials[0]; });
}

std::string to_string(const Transition& transition, const DeviceMesh& mesh) {
  std::ostringstream out;
  out << at::IntArrayRef(transition.shape) << " on " << mesh << ":";
  for (const auto& placement : transition.from) out << " " << placement;
  out << " ->";
  for (const auto& placement : transition.to) out << " " << placement;
  return out.str();
}

void on_random_transitions(const std::vector<int64_t>& mesh_shape, int count, unsigned seed,
                           const std::function<void(const DeviceMesh&, const Transition&)>& body) {
  run_ranks(c10::multiply_integers(mesh_shape), [&](int64_t) {
    const auto mesh = init_device_mesh(c10::kCPU, mesh_shape);
    std::mt19937 random(seed);
    for (int i = 0; i < count; ++i) {
      const auto transition = random_transition(random, mesh_shape);
      SCOPED_TRACE(to_string(transition, mesh));
      body(mesh, transition);
    }
  });
}

}  // namespace fsdp::testing
