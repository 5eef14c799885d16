// The integers of a mesh: which position each coordinate has. No tensors, no groups, no
// ranks' meaning.
//
// A layout maps coordinates (i_0, ..., i_{n-1}) to positions in a list of ranks: base +
// sum of i_d * stride_d. A dimension that was flattened from others may need several
// (size, stride) steps, the last varying fastest.
//
//   MeshLayout grid = MeshLayout::row_major({2, 4});      // positions 0..7
//   grid.along({1}, grid.coordinate_of(6)).positions();  // {4, 5, 6, 7}: row of 6
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

class MeshLayout {
 public:
  using Indices = std::vector<int64_t>;

  // Sizes must be positive.
  static MeshLayout row_major(const Indices& sizes);

  int64_t ndim() const { return static_cast<int64_t>(dims_.size()); }
  const Indices& sizes() const { return sizes_; }
  int64_t size() const;  // the product of the sizes

  int64_t position_of(const Indices& coordinate) const;
  std::optional<Indices> coordinate_of(
      int64_t position) const;  // nullopt: the layout does not contain it
  Indices positions() const;    // of all coordinates, row-major

  // The layout of dimensions `dims`, in that order, through `coordinate`.
  MeshLayout along(const Indices& dims, const Indices& coordinate) const;

  // The dimensions of this layout, then those of `inner`, through a position that both
  // have, which is `inner_coordinate` of `inner`. nullopt where two coordinates of the
  // result would be one position: the layouts have a direction in common.
  std::optional<MeshLayout> beside(const MeshLayout& inner, const Indices& inner_coordinate) const;

  // Which of the layouts like it, through other positions, this one is: 0, 1, ... in the
  // order of their first positions.
  int64_t slice_index() const;

  // Dimensions `dims` merged into one, whose index is row-major over them in the given
  // order. It stands where the first of them in this layout stood; the others keep their
  // order.
  MeshLayout merged(const Indices& dims) const;
  int64_t merged_position(
      const Indices& dims) const;  // the index of that dimension in the new layout

  // Dimension `dim` as two, of sizes {size / n, n}: the second one walks blocks of `n`
  // neighbours. nullopt where no steps do that.
  std::optional<MeshLayout> split(int64_t dim, int64_t n) const;

  // "(4, 1)"; a dimension of several steps prints as a tuple: "((4, 1), 2)".
  std::string strides_text() const;

 private:
  struct Step {
    int64_t size;
    int64_t stride;
  };
  using Dimension = std::vector<Step>;

  MeshLayout(std::vector<Dimension> dims, int64_t base);
  static int64_t extent(const Dimension& dim);
  static int64_t offset(const Dimension& dim, int64_t index);
  static void append(Dimension& dim, Step step);

  std::vector<Dimension> dims_;
  Indices sizes_;
  int64_t base_ = 0;
};

}  // namespace fsdp::internal
