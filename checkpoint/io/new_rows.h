// A tensor that has more rows (indices of its first dimension) than the file has of it,
// such as the table of a vocabulary that was enlarged: which of this rank's boxes the
// file fills, and which rows are new. No torch here.
#pragma once

#include "checkpoint/format/box.h"
#include "dtensor/layout/local_boxes.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal::checkpoint {

// What the file's `rows` rows are of `boxes`.
std::vector<LocalBox> old_boxes(std::vector<LocalBox> boxes, int64_t rows);

struct NewRows {
  int64_t first = 0;  // of the tensor
  Box place;          // in what this rank holds
};
// The others; none where this rank has none of them.
std::vector<NewRows> new_rows(const std::vector<LocalBox>& boxes, int64_t rows);

}  // namespace fsdp::internal::checkpoint
