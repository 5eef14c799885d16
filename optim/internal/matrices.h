// The matrices that a tensor is for an optimizer that needs them whole. No torch here.
//
//   matrices_of({4096, 1024}, {});                       // one of 4096 x 1024
//   matrices_of({4096, 1024}, {.matrix_rows = 128});     // 32 heads of 128 x 1024
//   matrices_of({8, 512, 128}, {.leading_dims_are_batch = true});   // 8 experts of 512 x 128
#pragma once

#include "dtensor/layout/tensor_layout.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

struct MatrixOptions {
  int64_t matrix_rows = 0;  // of a 2-D tensor: each so many rows are a matrix; 0: all are one
  bool leading_dims_are_batch = false;
};

struct Matrices {
  int64_t count = 0, rows = 0, columns = 0;
  bool operator==(const Matrices&) const = default;
};

// Throws std::invalid_argument, which says why, for a shape that is not of matrices.
Matrices matrices_of(const std::vector<int64_t>& shape, const MatrixOptions& options);

// Whether what every rank holds of such a tensor are matrices, each whole: there is
// nothing to send. REQUIRES: matrices_of(layout.shape(), options) does not throw.
bool are_whole_on_all_ranks(const TensorLayout& layout, const MatrixOptions& options);

// Of the Newton-Schulz iteration, up to a factor: s^2 (2 l + s) for each matrix with a
// shorter side s and a longer side l.
double newton_schulz_cost(const Matrices& matrices);

}  // namespace fsdp::internal
