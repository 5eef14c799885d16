// A cut stays where some dimension of the new shape has each rank's elements, in blocks
// and atoms if need be.
#include "dtensor/ops/op_table.h"
#include "dtensor/strategy/view_cuts.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

using Shape = std::vector<int64_t>;

// The size that argument 1 of view and its like asks for. -1: what is left.
Shape asked_shape(const OpSchema& call) {
  Shape shape = call.numbers(1);
  int64_t known = 1;
  for (const int64_t size : shape) known *= size == -1 ? 1 : size;
  int64_t elements = 1;
  for (const int64_t size : call.operands[0].shape) elements *= size;
  for (int64_t& size : shape) {
    if (size == -1) size = known == 0 ? 0 : elements / known;
  }
  return shape;
}

// Whether dimension `before_dim` of [before] is dimension `after_dim` of a view [after].
bool is_same_dim(const Shape& before, int64_t before_dim, const Shape& after, int64_t after_dim) {
  const auto left = [](const Shape& shape, int64_t dim) {
    return std::accumulate(shape.begin(), shape.begin() + dim, int64_t{1}, std::multiplies<>());
  };
  return before[static_cast<size_t>(before_dim)] == after[static_cast<size_t>(after_dim)] &&
         left(before, before_dim) == left(after, after_dim);
}

// The placements by which operand 0 can be viewed as [after], and those of the view.
struct Viewed {
  const Shape& before;
  const Shape& after;
  const Shape& mesh_shape;
  TensorPlacements from, to;

  // The mesh dimension before `m` that cuts the same tensor dimension, and still does.
  std::optional<size_t> cut_around(size_t m) const {
    for (size_t around = 0; around < m; ++around) {
      if (from[around].is_shard(from[m].shard_dim())) return around;
    }
    return std::nullopt;
  }

  // A chunk of a chunk is the same one where the view leaves the dimension as it is.
  std::optional<Placement> cut_inside(size_t m, size_t around) const {
    if (!to[around].is_shard()) return std::nullopt;
    const int64_t after_dim = to[around].shard_dim();
    const bool stays = is_same_dim(before, from[m].shard_dim(), after, after_dim) &&
                       from[around].along(after_dim) == to[around];
    return stays ? std::optional(from[m].along(after_dim)) : std::nullopt;
  }

  bool is_cut_before(size_t m, int64_t dim) const {
    return std::any_of(to.begin(), to.begin() + static_cast<std::ptrdiff_t>(m),
                       [dim](const auto& placement) { return placement.is_shard(dim); });
  }

  // Mesh dimension `m`'s cut after the view; nothing where no dimension keeps it.
  std::optional<Placement> kept(size_t m) const {
    if (const auto around = cut_around(m)) return cut_inside(m, *around);
    const auto cut = viewed_cut(before, after, from[m].shard(), mesh_shape[m]);
    if (!cut || is_cut_before(m, cut->dim)) return std::nullopt;
    if (mesh_shape[m] == 1 && Placement(*cut).is_interleaved()) return std::nullopt;
    return *cut;
  }
};

// Where no dimension of the new shape keeps a cut, that mesh dimension replicates.
Propagation view_propagation(const OpSchema& call, const CallPlacements& placements) {
  const Shape after = asked_shape(call);
  Viewed viewed{.before = call.operands[0].shape,
                .after = after,
                .mesh_shape = placements.mesh_shape,
                .from = placements.operands[0],
                .to = placements.operands[0]};
  for (size_t m = 0; m < viewed.from.size() && after != viewed.before; ++m) {
    if (!viewed.from[m].is_shard()) continue;
    const auto kept = viewed.kept(m);
    viewed.to[m] = kept.value_or(Replicate{});
    if (!kept) viewed.from[m] = Replicate{};
  }
  return {.operands = {std::move(viewed.from)}, .results = {std::move(viewed.to)}};
}

std::vector<PartArgument> view_part(const OpSchema&, const PlacedCall& placed) {
  return {{1, placed.results[0].local_shape(placed.coordinate)}};
}

// _reshape_alias(self, size, stride): the strides of a part follow from its own.
std::vector<c10::IValue> reshape_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const auto shape = placed.result(0).local_shape(placed.mesh().coordinate());
  return {call.argument(0).toTensor().view(shape)};
}

}  // namespace

void add_reshape(OpTable& table) {
  const OpStrategy strategies{.propagation = view_propagation, .part_arguments = view_part};
  for (const char* name : {"view.", "_unsafe_view."}) table.add(name, {.strategy = strategies});
  table.add("_reshape_alias.", {.strategy = strategies, .local_kernel = reshape_part});
}

}  // namespace fsdp::internal
