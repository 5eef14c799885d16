#include "dtensor/layout/local_boxes.h"

#include <algorithm>

namespace fsdp::internal {

namespace {

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

}  // namespace fsdp::internal
