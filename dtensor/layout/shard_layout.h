// Where a shard lies: the integer arithmetic of torch.chunk, of blocks and atoms, and of
// chunks of chunks on an n-D mesh; which shape and which boxes of a tensor a rank holds.
// No torch here.
//
//   chunk_of(/*size=*/5, /*parts=*/4, /*index=*/2);   // {offset 4, length 1}
//   chunk_of(5, 4, 3);  // {offset 5, length 0}: trailing chunks may be empty
#pragma once

#include "dtensor/placement.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

struct Chunk {
  int64_t offset = 0;
  int64_t length = 0;
  bool operator==(const Chunk&) const = default;
};

// The size of the largest chunk, ceil(size / parts). REQUIRES: size >= 0, parts >= 1.
int64_t chunk_capacity(int64_t size, int64_t parts);

// Chunk `index` of torch.chunk(size, parts); past the end it is empty and lies at `size`.
// REQUIRES: 0 <= index < parts.
Chunk chunk_of(int64_t size, int64_t parts, int64_t index);

// The atoms in each block of a dimension of `size` elements, and how many elements one
// has; where the cut has local_units, these are the atoms. REQUIRES: both divide.
int64_t atoms_of(const Shard& cut, int64_t size);
int64_t atom_size(const Shard& cut, int64_t size);
// The atoms of each block that coordinate `index` of `ranks` has.
Chunk own_atoms(const Shard& cut, int64_t size, int64_t ranks, int64_t index);
// Whether `size` elements are whole atoms. REQUIRES: is_well_formed().
bool divides(const Shard& cut, int64_t size);
// Whether its numbers can cut a dimension over `ranks` ranks at all.
bool is_well_formed(const Shard& cut, int64_t ranks);
// The most elements that one coordinate has.
int64_t largest_part(const Shard& cut, int64_t size, int64_t ranks);

// The simplest cut by which each of `ranks` ranks has the same of a dimension of `size`
// elements as by `cut`: equal cuts are written alike. All that one rank has is one block.
Shard simplest(const Shard& cut, int64_t size, int64_t ranks);

// `shape` with dimension cut.dim as blocks, atoms and elements of an atom: along the
// middle one of the three an interleaved cut (PyTorch's _StridedShard) is a plain one.
std::vector<int64_t> split_shape(std::vector<int64_t> shape, const Shard& cut);

// What a mesh coordinate holds of a tensor that lies as `placements`, one per mesh
// dimension, say. REQUIRES: outer * unit divides what earlier cuts left of a dimension.
std::vector<int64_t> local_shape(std::vector<int64_t> shape, const std::vector<int64_t>& mesh_shape,
                                 const std::vector<Placement>& placements,
                                 const std::vector<int64_t>& coordinate);

// A box of a tensor that a rank holds.
struct LocalBox {
  std::vector<Chunk> box;      // of the tensor: offset and length per dimension
  std::vector<int64_t> begin;  // where in the rank's part, which has local_shape(), it begins
  bool operator==(const LocalBox&) const = default;
};

// All the boxes that one mesh coordinate holds: one, or where cuts have blocks
// (Shard::outer) one of each block. They come in the order in which the boxes begin in
// its part. Mesh dimension m cuts as placements[m] says what an earlier one left, put
// together. Boxes that touch along a cut dimension are one. Of a part without elements
// one box without elements. REQUIRES: as of local_shape().
//
//   local_boxes({12}, {2}, {Shard{.dim = 0, .outer = 3}}, /*coordinate=*/{1});
//   // {2, 2}, {6, 2} and {10, 2} of the tensor, at 0, 2 and 4 of the rank's part
std::vector<LocalBox> local_boxes(const std::vector<int64_t>& shape,
                                  const std::vector<int64_t>& mesh_shape,
                                  const std::vector<Placement>& placements,
                                  const std::vector<int64_t>& coordinate);

// Row-major strides, as at::empty(shape) has them.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape);

// The dimensions from the outermost in memory to the innermost; row-major where the
// strides repeat elements.
std::vector<int64_t> memory_order(const std::vector<int64_t>& shape,
                                  const std::vector<int64_t>& stride);

// The strides of a copy without gaps whose dimensions keep their order in memory.
std::vector<int64_t> dense_strides(const std::vector<int64_t>& shape,
                                   const std::vector<int64_t>& stride);

}  // namespace fsdp::internal
