#include "dtensor/layout/shard_layout.h"

#include <algorithm>
#include <numeric>

namespace fsdp::internal {
namespace {

// The first rank has the whole dimension.
Shard simplest_of_one_rank(int64_t dim, int64_t size, int64_t ranks) {
  const bool is_plain = chunk_capacity(size, ranks) >= size;
  return {.dim = dim, .outer = 1, .unit = is_plain ? 1 : size};
}

// As torch.chunk, where that is the same, and as an owner, where one has everything.
Shard simplest_of_ragged(const Shard& cut, int64_t size, int64_t ranks) {
  const LocalUnits& units = cut.local_units;
  bool is_plain = true;
  LocalUnits simple = units;
  for (int64_t index = 0; index < ranks; ++index) {
    const int64_t length = units.at(index) * atom_size(cut, size);
    is_plain = is_plain && length == chunk_of(size, ranks, index).length;
    if (units.at(index) == units.total()) simple = LocalUnits::of_owner(index);
  }
  return {.dim = cut.dim, .local_units = is_plain ? LocalUnits() : simple};
}

// What a rank has of one dimension, in the order in which its part has it. Never none.
using Runs = std::vector<Chunk>;

int64_t length_of(const Runs& runs) {
  int64_t length = 0;
  for (const Chunk& run : runs) length += run.length;
  return length;
}

void append(Runs& runs, const Chunk& next) {
  if (next.length == 0) return;
  const bool touches = !runs.empty() && runs.back().offset + runs.back().length == next.offset;
  if (touches) {
    runs.back().length += next.length;
  } else {
    runs.push_back(next);
  }
}

// Appends elements [wanted] of `runs`, put together, to `mine`.
void append_part(Runs& mine, const Runs& runs, const Chunk& wanted) {
  int64_t before = 0;
  for (const Chunk& run : runs) {
    const int64_t begin = std::max<int64_t>(wanted.offset - before, 0);
    const int64_t end = std::min(wanted.offset + wanted.length - before, run.length);
    append(mine, {run.offset + begin, std::max<int64_t>(end - begin, 0)});
    before += run.length;
  }
}

Runs cut_runs(const Runs& runs, const Shard& cut, int64_t ranks, int64_t index) {
  const int64_t length = length_of(runs), block = length / cut.outer;
  const Chunk own = own_atoms(cut, length, ranks, index);
  const int64_t unit = atom_size(cut, length);
  Runs mine;
  for (int64_t i = 0; i < cut.outer; ++i)
    append_part(mine, runs, {i * block + own.offset * unit, own.length * unit});
  if (mine.empty()) mine.push_back({runs.back().offset + runs.back().length, 0});
  return mine;
}

// With each box once for every run of one dimension more.
std::vector<LocalBox> with_dimension(const std::vector<LocalBox>& boxes, const Runs& runs) {
  std::vector<LocalBox> more;
  more.reserve(boxes.size() * runs.size());
  for (const LocalBox& each : boxes) {
    int64_t begin = 0;
    for (const Chunk& run : runs) {
      LocalBox& added = more.emplace_back(each);
      added.box.push_back(run);
      added.begin.push_back(begin);
      begin += run.length;
    }
  }
  return more;
}

}  // namespace

int64_t chunk_capacity(int64_t size, int64_t parts) { return (size + parts - 1) / parts; }

Chunk chunk_of(int64_t size, int64_t parts, int64_t index) {
  const int64_t capacity = chunk_capacity(size, parts);
  const int64_t begin = std::min(size, capacity * index);
  const int64_t end = std::min(size, capacity * (index + 1));
  return {.offset = begin, .length = end - begin};
}

int64_t atoms_of(const Shard& cut, int64_t size) {
  return cut.local_units.has_value() ? cut.local_units.total() : size / (cut.outer * cut.unit);
}

int64_t atom_size(const Shard& cut, int64_t size) {
  return cut.local_units.has_value() ? size / cut.local_units.total() : cut.unit;
}

Chunk own_atoms(const Shard& cut, int64_t size, int64_t ranks, int64_t index) {
  if (!cut.local_units.has_value()) return chunk_of(atoms_of(cut, size), ranks, index);
  return {.offset = cut.local_units.before(index), .length = cut.local_units.at(index)};
}

bool divides(const Shard& cut, int64_t size) {
  if (cut.local_units.has_value()) return size % cut.local_units.total() == 0;
  return size % cut.outer == 0 && size / cut.outer % cut.unit == 0;
}

bool is_well_formed(const Shard& cut, int64_t ranks) {
  if (cut.outer < 1 || cut.unit < 1) return false;
  if (!cut.local_units.has_value()) return true;
  const int64_t coordinates = cut.local_units.coordinates();
  const bool fits = coordinates == ranks || (cut.local_units.owner() && coordinates < ranks);
  return cut.outer == 1 && cut.unit == 1 && cut.local_units.can_cut() && fits;
}

int64_t largest_part(const Shard& cut, int64_t size, int64_t ranks) {
  const int64_t atoms = cut.local_units.has_value() ? cut.local_units.most()
                                                    : chunk_capacity(atoms_of(cut, size), ranks);
  return cut.outer * atoms * atom_size(cut, size);
}

Shard simplest(const Shard& cut, int64_t size, int64_t ranks) {
  if (cut.local_units.has_value()) return simplest_of_ragged(cut, size, ranks);
  const int64_t atoms = atoms_of(cut, size);
  const int64_t capacity = chunk_capacity(atoms, ranks);
  if (capacity >= atoms) return simplest_of_one_rank(cut.dim, size, ranks);
  const int64_t block = size / cut.outer;
  for (int64_t unit = 1; unit < cut.unit; ++unit) {
    if (block % unit != 0) continue;
    if (unit * chunk_capacity(block / unit, ranks) == capacity * cut.unit)
      return {.dim = cut.dim, .outer = cut.outer, .unit = unit};
  }
  return cut;
}

std::vector<int64_t> split_shape(std::vector<int64_t> shape, const Shard& cut) {
  const auto dim = shape.begin() + cut.dim;
  const int64_t atoms = atoms_of(cut, *dim);
  *dim = cut.outer;
  shape.insert(dim + 1, {atoms, cut.unit});
  return shape;
}

std::vector<int64_t> local_shape(std::vector<int64_t> shape, const std::vector<int64_t>& mesh_shape,
                                 const std::vector<Placement>& placements,
                                 const std::vector<int64_t>& coordinate) {
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_shard()) continue;
    const Shard& cut = placements[m].shard();
    int64_t& size = shape[static_cast<size_t>(cut.dim)];
    const Chunk own = own_atoms(cut, size, mesh_shape[m], coordinate[m]);
    size = cut.outer * own.length * atom_size(cut, size);
  }
  return shape;
}

std::vector<LocalBox> local_boxes(const std::vector<int64_t>& shape,
                                  const std::vector<int64_t>& mesh_shape,
                                  const std::vector<Placement>& placements,
                                  const std::vector<int64_t>& coordinate) {
  std::vector<Runs> dimensions;
  dimensions.reserve(shape.size());
  for (const int64_t size : shape) dimensions.push_back({{.offset = 0, .length = size}});
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_shard()) continue;
    const Shard& cut = placements[m].shard();
    Runs& runs = dimensions[static_cast<size_t>(cut.dim)];
    runs = cut_runs(runs, cut, mesh_shape[m], coordinate[m]);
  }
  std::vector<LocalBox> boxes(1);
  for (const Runs& runs : dimensions) boxes = with_dimension(boxes, runs);
  return boxes;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;)
    strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  return strides;
}

std::vector<int64_t> memory_order(const std::vector<int64_t>& shape,
                                  const std::vector<int64_t>& stride) {
  std::vector<int64_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (stride[d] == 0 && shape[d] > 1) return order;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return stride[a] > stride[b]; });
  return order;
}

std::vector<int64_t> dense_strides(const std::vector<int64_t>& shape,
                                   const std::vector<int64_t>& stride) {
  std::vector<int64_t> dense(shape.size(), 1);
  const auto order = memory_order(shape, stride);
  int64_t next = 1;
  for (size_t i = order.size(); i-- > 0;) {
    dense[order[i]] = next;
    next *= std::max<int64_t>(shape[order[i]], 1);
  }
  return dense;
}

}  // namespace fsdp::internal
