#include "checkpoint/format/saved_layout.h"

#include "dtensor/dtensor.h"
#include "dtensor/layout/shard_layout.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <numeric>
#include <stdexcept>
#include <string_view>

namespace fsdp::internal::checkpoint {
namespace {

// Row-major: the last dimension varies fastest.
std::vector<int64_t> coordinate_of(int64_t index, const std::vector<int64_t>& shape) {
  std::vector<int64_t> coordinate(shape.size());
  for (size_t dim = shape.size(); dim > 0; --dim) {
    coordinate[dim - 1] = index % shape[dim - 1];
    index /= shape[dim - 1];
  }
  return coordinate;
}

int64_t replica_of(const SavedLayout& layout, const std::vector<int64_t>& coordinate) {
  int64_t replica = 0;
  for (size_t dim = 0; dim < coordinate.size(); ++dim) {
    if (layout.placements[dim].is_shard()) continue;
    replica = replica * layout.mesh_shape[dim] + coordinate[dim];
  }
  return replica;
}

// Of the digits of `text` from `begin` on; -1 for none.
int64_t number_at(const std::string& text, size_t begin) {
  int64_t number = -1;
  std::from_chars(text.data() + begin, text.data() + text.size(), number);
  return number;
}

// Of the number behind `key` in `text`; 1 for none.
int64_t number_of(const std::string& text, std::string_view key) {
  const size_t found = text.find(key);
  return found == std::string::npos ? 1 : number_at(text, found + key.size());
}

// Nothing for 1.
std::string text_of(std::string_view key, int64_t number) {
  return number == 1 ? "" : std::string(key) + std::to_string(number);
}

constexpr std::string_view kOuter = ", outer=", kUnit = ", unit=", kUnits = ", local_units=";

// The list behind that key; none where the text lacks it.
LocalUnits local_units_of(const std::string& text) {
  const size_t found = text.find(kUnits);
  if (found == std::string::npos) return {};
  std::vector<int64_t> units;
  for (size_t next = found + kUnits.size(); next != std::string::npos; next = text.find(' ', next))
    units.push_back(number_at(text, ++next));
  return LocalUnits(units);
}

}  // namespace

std::string placement_text(const Placement& placement) {
  if (!placement.is_shard()) return "R";
  const auto& [dim, outer, unit, local_units] = placement.shard();
  return "S(" + std::to_string(dim) + text_of(kOuter, outer) + text_of(kUnit, unit) +
         (local_units.has_value() ? std::string(kUnits) + local_units.to_string() : "") + ")";
}

Placement placement_from(const std::string& text) {
  if (text == "R") return Replicate{};
  Shard cut{.dim = text.starts_with("S(") ? number_at(text, 2) : -1};
  cut.outer = number_of(text, kOuter);
  cut.unit = number_of(text, kUnit);
  cut.local_units = local_units_of(text);
  if (cut.dim < 0 || cut.outer < 1 || cut.unit < 1 || placement_text(cut) != text)
    throw std::runtime_error("unknown placement '" + text + "'");
  return cut;
}

SavedLayout layout_of(const at::Tensor& tensor, int64_t world_size, const std::string& name) {
  SavedLayout layout;
  if (!is_dtensor(tensor)) {
    layout.mesh_shape = {world_size};
    layout.ranks.resize(static_cast<size_t>(world_size));
    std::iota(layout.ranks.begin(), layout.ranks.end(), 0);
    layout.placements = {Replicate{}};
    return layout;
  }
  const DTensorSpec& spec = spec_of(tensor);
  layout.mesh_shape = spec.mesh().shape();
  layout.mesh_names = spec.mesh().dim_names();
  layout.ranks = spec.mesh().ranks();
  for (const Placement& placement : spec.placements()) {
    TORCH_CHECK_VALUE(!placement.is_partial(), "checkpoint: '", name, "' has the placement ",
                      to_string(placement), ", whose value lies nowhere yet; redistribute() it");
  }
  layout.placements = spec.placements();
  return layout;
}

int64_t replica_count(const SavedLayout& layout) {
  int64_t count = 1;
  for (size_t dim = 0; dim < layout.mesh_shape.size(); ++dim) {
    if (!layout.placements[dim].is_shard()) count *= layout.mesh_shape[dim];
  }
  return count;
}

std::vector<WrittenBox> written_boxes(const SavedLayout& layout, const std::vector<int64_t>& shape,
                                      int64_t replica) {
  const Box whole = whole_box(shape);
  std::vector<WrittenBox> boxes;
  for (size_t i = 0; i < layout.ranks.size(); ++i) {
    const auto coordinate = coordinate_of(static_cast<int64_t>(i), layout.mesh_shape);
    if (replica_of(layout, coordinate) != replica) continue;
    if (numel_of(whole) == 0) return {{.rank = layout.ranks[i], .box = whole, .begin = {}}};
    int64_t number = 0;
    for (auto& own : local_boxes(shape, layout.mesh_shape, layout.placements, coordinate)) {
      if (numel_of(own.box) == 0) continue;
      boxes.push_back({layout.ranks[i], number++, std::move(own.box), std::move(own.begin)});
    }
  }
  return boxes;
}

}  // namespace fsdp::internal::checkpoint
