#include "tests/dtensor/views/random_view.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <sstream>

namespace fsdp::testing {
namespace {

Sizes draw_shape(Draws& draws) {
  Sizes shape;
  do {
    shape.clear();
    for (int dims = draws.between(1, 4); dims > 0; --dims) {
      const bool is_special = draws.chance(12);
      shape.push_back(is_special ? draws.pick({0, 1, 1, 1}) : draws.between(2, 12));
    }
  } while (c10::multiply_integers(shape) > kMostElements);
  return shape;
}

Placement draw_cut(Draws& draws, const Sizes& shape, std::vector<bool>& is_cut) {
  const auto dim = static_cast<size_t>(draws.between(0, static_cast<int>(shape.size()) - 1));
  Shard cut{.dim = static_cast<int64_t>(dim)};
  const bool is_first = !is_cut[dim];
  is_cut[dim] = true;
  if (is_first && shape[dim] > 0 && draws.chance(60)) {
    if (draws.chance(60)) cut.outer = draw_divisor(draws, shape[dim]);
    if (draws.chance(60)) cut.unit = draw_divisor(draws, shape[dim] / cut.outer);
  }
  return cut;
}

std::vector<Placement> draw_placements(Draws& draws, const Sizes& mesh, const Sizes& shape) {
  std::vector<Placement> placements;
  std::vector<bool> is_cut(shape.size());
  for (size_t m = 0; m < mesh.size(); ++m) {
    const bool is_whole = draws.chance(mesh.size() > 1 ? 20 : 3);
    placements.push_back(is_whole ? Replicate{} : draw_cut(draws, shape, is_cut));
  }
  return placements;
}

}  // namespace

RandomView draw_view(uint64_t seed) {
  Draws draws(seed);
  RandomView view{.seed = seed};
  view.mesh = draws.pick<Sizes>({{1}, {2}, {2}, {3}, {3}, {4}, {2, 2}, {2, 2}});
  view.shape = draw_shape(draws);
  view.memory_order = draws.permutation(static_cast<int64_t>(view.shape.size()));
  if (draws.chance(80)) std::sort(view.memory_order.begin(), view.memory_order.end());
  view.placements = draw_placements(draws, view.mesh, view.shape);
  at::Tensor plain = viewed_tensor(view);
  for (int steps = draws.between(1, 4); steps > 0; --steps) {
    view.steps.push_back(draw_step(draws, plain));
    plain = view.steps.back().apply(plain);
  }
  return view;
}

std::string to_string(const RandomView& view) {
  std::ostringstream out;
  out << "view of seed " << view.seed << ": " << at::IntArrayRef(view.shape) << " in memory as "
      << at::IntArrayRef(view.memory_order) << " on mesh " << at::IntArrayRef(view.mesh);
  for (const Placement& placement : view.placements) out << ", " << placement;
  for (const ViewStep& step : view.steps) out << ", " << step.text;
  return out.str();
}

at::Tensor viewed_tensor(const RandomView& view) {
  Sizes sizes_in_memory, place(view.shape.size());
  for (size_t i = 0; i < view.shape.size(); ++i) {
    const int64_t dim = view.memory_order[i];
    sizes_in_memory.push_back(view.shape[static_cast<size_t>(dim)]);
    place[static_cast<size_t>(dim)] = static_cast<int64_t>(i);
  }
  return at::arange(c10::multiply_integers(view.shape), at::kDouble)
      .view(sizes_in_memory)
      .permute(place);
}

}  // namespace fsdp::testing
