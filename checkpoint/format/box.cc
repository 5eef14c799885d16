#include "checkpoint/format/box.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace fsdp::internal::checkpoint {
namespace {

// The elements between neighbours of dimension `dim` in a row-major box.
std::vector<int64_t> strides_of(const Box& box) { return contiguous_strides(lengths_of(box)); }

// Dimensions from here on are one run: all but the first of them are whole in both boxes.
size_t first_run_dim(const Box& common, const Box& source, const Box& target) {
  size_t dim = common.size();
  while (dim > 0) {
    --dim;
    if (common[dim] != source[dim] || common[dim] != target[dim]) break;
  }
  return dim;
}

// The dimension in which most of them begin elsewhere. REQUIRES: there is one.
size_t dim_of_cut(const std::vector<Box>& boxes) {
  size_t best = 0, most = 0;
  for (size_t dim = 0; dim < boxes.front().size(); ++dim) {
    std::set<int64_t> offsets;
    for (const Box& box : boxes) offsets.insert(box[dim].offset);
    if (offsets.size() > most) best = dim, most = offsets.size();
  }
  return best;
}

}  // namespace

Box whole_box(const std::vector<int64_t>& shape) {
  Box box;
  for (const int64_t size : shape) box.push_back({0, size});
  return box;
}

Box box_at(const std::vector<int64_t>& offsets, const std::vector<int64_t>& lengths) {
  Box box;
  for (size_t i = 0; i < lengths.size(); ++i) box.push_back({offsets[i], lengths[i]});
  return box;
}

std::vector<int64_t> offsets_of(const Box& box) {
  std::vector<int64_t> offsets;
  for (const Chunk& chunk : box) offsets.push_back(chunk.offset);
  return offsets;
}

std::vector<int64_t> lengths_of(const Box& box) {
  std::vector<int64_t> lengths;
  for (const Chunk& chunk : box) lengths.push_back(chunk.length);
  return lengths;
}

int64_t numel_of(const Box& box) {
  int64_t numel = 1;
  for (const Chunk& chunk : box) numel *= chunk.length;
  return numel;
}

std::optional<int64_t> product_of(int64_t factor, const std::vector<int64_t>& sizes) {
  bool is_empty = false;
  for (const int64_t size : sizes) {
    is_empty |= size == 0;
    if (size < 0 || __builtin_mul_overflow(factor, std::max<int64_t>(size, 1), &factor)) {
      return std::nullopt;
    }
  }
  return is_empty ? 0 : factor;
}

bool can_be_shape(const std::vector<int64_t>& shape) {
  constexpr int64_t kLargestElement = 16;
  return product_of(kLargestElement, shape).has_value();
}

std::string to_string(const Box& box) {
  std::string text = "[";
  for (const Chunk& chunk : box) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(chunk.offset) + ":" + std::to_string(chunk.offset + chunk.length);
  }
  return text + "]";
}

Box intersect(const Box& a, const Box& b) {
  Box common;
  for (size_t i = 0; i < a.size(); ++i) {
    const int64_t begin = std::max(a[i].offset, b[i].offset);
    const int64_t end = std::min(a[i].offset + a[i].length, b[i].offset + b[i].length);
    common.push_back({begin, std::max<int64_t>(0, end - begin)});
  }
  return common;
}

std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<Box>& boxes) {
  if (boxes.size() < 2) return std::nullopt;
  if (boxes.front().empty()) return std::pair<size_t, size_t>(0, 1);
  const size_t dim = dim_of_cut(boxes);
  std::vector<size_t> order(boxes.size()), open;
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return boxes[a][dim].offset < boxes[b][dim].offset; });
  for (const size_t next : order) {
    std::erase_if(open, [&](size_t each) {
      return boxes[each][dim].offset + boxes[each][dim].length <= boxes[next][dim].offset;
    });
    for (const size_t each : open) {
      if (numel_of(intersect(boxes[each], boxes[next])) > 0) return std::pair(each, next);
    }
    open.push_back(next);
  }
  return std::nullopt;
}

Box shifted(const Box& box, const std::vector<int64_t>& by) {
  Box further = box;
  for (size_t i = 0; i < box.size(); ++i) further[i].offset += by[i];
  return further;
}

void for_each_run(const Box& common, const Box& source, const Box& target,
                  const std::function<void(const Run&)>& visit) {
  if (numel_of(common) == 0) return;
  const size_t run_dim = first_run_dim(common, source, target);
  const auto source_strides = strides_of(source), target_strides = strides_of(target);
  Run run{0, 0, 1};
  for (size_t dim = run_dim; dim < common.size(); ++dim) run.length *= common[dim].length;
  for (size_t dim = 0; dim < common.size(); ++dim) {
    run.from += (common[dim].offset - source[dim].offset) * source_strides[dim];
    run.to += (common[dim].offset - target[dim].offset) * target_strides[dim];
  }
  std::vector<int64_t> index(run_dim, 0);
  for (;;) {
    visit(run);
    size_t dim = run_dim;
    for (; dim > 0; --dim) {  // an odometer over the outer dimensions
      const size_t at = dim - 1;
      run.from += source_strides[at], run.to += target_strides[at];
      if (++index[at] < common[at].length) break;
      run.from -= index[at] * source_strides[at], run.to -= index[at] * target_strides[at];
      index[at] = 0;
    }
    if (dim == 0) return;
  }
}

}  // namespace fsdp::internal::checkpoint
