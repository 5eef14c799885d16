#include "device_mesh/internal/mesh_layout.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

using Indices = MeshLayout::Indices;

std::string tuple_text(const std::vector<std::string>& parts) {
  std::string text = "(";
  for (size_t i = 0; i < parts.size(); ++i) text += (i ? ", " : "") + parts[i];
  return text + (parts.size() == 1 ? ",)" : ")");
}

bool contains(const Indices& list, int64_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

}  // namespace

MeshLayout::MeshLayout(std::vector<Dimension> dims, int64_t base)
    : dims_(std::move(dims)), base_(base) {
  for (const Dimension& dim : dims_) sizes_.push_back(extent(dim));
}

MeshLayout MeshLayout::row_major(const Indices& sizes) {
  std::vector<Dimension> dims(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    dims[d] = {{sizes[d], stride}};
    stride *= sizes[d];
  }
  return {std::move(dims), 0};
}

int64_t MeshLayout::extent(const Dimension& dim) {
  int64_t size = 1;
  for (const Step& step : dim) size *= step.size;
  return size;
}

int64_t MeshLayout::offset(const Dimension& dim, int64_t index) {
  int64_t total = 0;
  for (size_t s = dim.size(); s-- > 0;) {
    total += index % dim[s].size * dim[s].stride;
    index /= dim[s].size;
  }
  return total;
}

// Joins the step to the last one where the two walk the positions evenly, so that most
// flattened dimensions stay simple.
void MeshLayout::append(Dimension& dim, Step step) {
  if (!dim.empty() && step.size == 1) return;
  if (!dim.empty() && dim.back().size == 1) dim.pop_back();
  if (!dim.empty() && dim.back().stride == step.size * step.stride) {
    dim.back() = {dim.back().size * step.size, step.stride};
  } else {
    dim.push_back(step);
  }
}

int64_t MeshLayout::size() const {
  return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>());
}

int64_t MeshLayout::position_of(const Indices& coordinate) const {
  int64_t position = base_;
  for (size_t d = 0; d < dims_.size(); ++d) position += offset(dims_[d], coordinate[d]);
  return position;
}

Indices MeshLayout::positions() const {
  Indices all{base_};
  for (const Dimension& dim : dims_) {
    Indices next;
    next.reserve(all.size() * static_cast<size_t>(extent(dim)));
    for (const int64_t position : all) {
      for (int64_t index = 0; index < extent(dim); ++index)
        next.push_back(position + offset(dim, index));
    }
    all = std::move(next);
  }
  return all;
}

std::optional<Indices> MeshLayout::coordinate_of(int64_t position) const {
  const Indices all = positions();
  const auto found = std::find(all.begin(), all.end(), position);
  if (found == all.end()) return std::nullopt;
  int64_t index = found - all.begin();
  Indices coordinate(sizes_.size());
  for (size_t d = sizes_.size(); d-- > 0;) {
    coordinate[d] = index % sizes_[d];
    index /= sizes_[d];
  }
  return coordinate;
}

MeshLayout MeshLayout::along(const Indices& dims, const Indices& coordinate) const {
  std::vector<Dimension> kept;
  for (const int64_t d : dims) kept.push_back(dims_[static_cast<size_t>(d)]);
  int64_t base = base_;
  for (size_t d = 0; d < dims_.size(); ++d) {
    if (!contains(dims, static_cast<int64_t>(d))) base += offset(dims_[d], coordinate[d]);
  }
  return {std::move(kept), base};
}

std::optional<MeshLayout> MeshLayout::beside(const MeshLayout& inner,
                                             const Indices& inner_coordinate) const {
  auto dims = dims_;
  dims.insert(dims.end(), inner.dims_.begin(), inner.dims_.end());
  int64_t base = base_;
  for (size_t d = 0; d < inner.dims_.size(); ++d)
    base -= offset(inner.dims_[d], inner_coordinate[d]);
  MeshLayout both(std::move(dims), base);
  Indices all = both.positions();
  std::sort(all.begin(), all.end());
  const bool overlaps = std::adjacent_find(all.begin(), all.end()) != all.end();
  return overlaps ? std::nullopt : std::optional(std::move(both));
}

// Every step is a digit of positions, and a layout begins where all its digits are zero.
int64_t MeshLayout::slice_index() const {
  const auto begins_at = [this](int64_t position) {
    return std::all_of(dims_.begin(), dims_.end(), [position](const Dimension& dim) {
      return std::all_of(dim.begin(), dim.end(), [position](const Step& step) {
        return step.size == 1 || position / step.stride % step.size == 0;
      });
    });
  };
  int64_t index = 0;
  for (int64_t position = 0; position < base_; ++position) index += begins_at(position) ? 1 : 0;
  return index;
}

int64_t MeshLayout::merged_position(const Indices& dims) const {
  return *std::min_element(dims.begin(), dims.end());
}

MeshLayout MeshLayout::merged(const Indices& dims) const {
  Dimension joined;
  for (const int64_t d : dims) {
    for (const Step& step : dims_[static_cast<size_t>(d)]) append(joined, step);
  }
  std::vector<Dimension> result;
  for (int64_t d = 0; d < ndim(); ++d) {
    if (d == merged_position(dims)) result.push_back(joined);
    if (!contains(dims, d)) result.push_back(dims_[static_cast<size_t>(d)]);
  }
  return {std::move(result), base_};
}

std::optional<MeshLayout> MeshLayout::split(int64_t dim, int64_t n) const {
  Dimension blocks = dims_[static_cast<size_t>(dim)], inside;
  while (n > 1) {
    if (blocks.empty()) return std::nullopt;
    auto& fastest = blocks.back();
    const auto taken = std::min(n, fastest.size);
    if (n % taken != 0 || fastest.size % taken != 0) return std::nullopt;
    inside.insert(inside.begin(), {taken, fastest.stride});
    fastest = {fastest.size / taken, fastest.stride * taken};
    if (fastest.size == 1) blocks.pop_back();
    n /= taken;
  }
  if (blocks.empty()) blocks.push_back({1, 0});
  if (inside.empty()) inside.push_back({1, 0});
  auto dims = dims_;
  dims[static_cast<size_t>(dim)] = std::move(blocks);
  dims.insert(dims.begin() + dim + 1, std::move(inside));
  return MeshLayout(std::move(dims), base_);
}

std::string MeshLayout::strides_text() const {
  std::vector<std::string> parts;
  for (const Dimension& dim : dims_) {
    std::vector<std::string> steps;
    for (const Step& step : dim) steps.push_back(std::to_string(step.stride));
    parts.push_back(steps.size() == 1 ? steps.front() : tuple_text(steps));
  }
  return tuple_text(parts);
}

}  // namespace fsdp::internal
