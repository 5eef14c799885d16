// The integer geometry of loading: which elements of a saved box a wanted box needs, as
// runs that are contiguous in both. No torch here.
//
//   Box saved{{0, 4}, {0, 5}}, wanted{{2, 3}, {0, 5}};        // {offset, length} per dimension
//   Box common = intersect(saved, wanted);                    // {{2, 2}, {0, 5}}
//   for_each_run(common, saved, wanted, [](Run run) { ... }); // one run of 10 elements
#pragma once

#include "dtensor/layout/shard_layout.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {

using Box = std::vector<Chunk>;  // one chunk per tensor dimension

Box whole_box(const std::vector<int64_t>& shape);
Box box_at(const std::vector<int64_t>& offsets, const std::vector<int64_t>& lengths);
std::vector<int64_t> offsets_of(const Box& box);
std::vector<int64_t> lengths_of(const Box& box);
int64_t numel_of(const Box& box);
// `factor` times all of `sizes`; nullopt where one is negative, or where 64 bits do not
// hold the product of those that are not 0.
std::optional<int64_t> product_of(int64_t factor, const std::vector<int64_t>& sizes);
// Whether 64 bits hold the bytes of a tensor of that shape, of whatever dtype.
bool can_be_shape(const std::vector<int64_t>& shape);
std::string to_string(const Box& box);  // "[0:4, 0:5]"

// Empty in some dimension where they do not meet. REQUIRES: the same number of
// dimensions.
Box intersect(const Box& a, const Box& b);

// Two of `boxes` that have an element in common, by their indices; nullopt for none. In
// n log n time where they are cut along one dimension. REQUIRES: as many dimensions in
// all.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<Box>& boxes);

// `box` as many elements further on in each dimension.
Box shifted(const Box& box, const std::vector<int64_t>& by);

// `length` elements that lie at element `from` of the source box and `to` of the target
// box, both row-major.
struct Run {
  int64_t from = 0;
  int64_t to = 0;
  int64_t length = 0;
};
// The longest runs that make up `common`, with rising `from`. REQUIRES: `common` lies in
// both.
void for_each_run(const Box& common, const Box& source, const Box& target,
                  const std::function<void(const Run&)>& visit);

}  // namespace fsdp::internal::checkpoint
