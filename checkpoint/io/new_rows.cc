#include "checkpoint/io/new_rows.h"

#include <algorithm>

namespace fsdp::internal::checkpoint {
namespace {

// How many of a box's rows the file has.
int64_t old_rows_of(const LocalBox& box, int64_t rows) {
  const auto& [offset, length] = box.box.front();
  return std::clamp<int64_t>(rows - offset, 0, length);
}

}  // namespace

std::vector<LocalBox> old_boxes(std::vector<LocalBox> boxes, int64_t rows) {
  for (auto& box : boxes) box.box.front().length = old_rows_of(box, rows);
  return boxes;
}

std::vector<NewRows> new_rows(const std::vector<LocalBox>& boxes, int64_t rows) {
  std::vector<NewRows> found;
  for (const auto& box : boxes) {
    const auto old = old_rows_of(box, rows);
    NewRows rest{.first = box.box.front().offset + old,
                 .place = box_at(box.begin, lengths_of(box.box))};
    rest.place.front().offset += old;
    rest.place.front().length -= old;
    if (numel_of(rest.place) > 0) found.push_back(std::move(rest));
  }
  return found;
}

}  // namespace fsdp::internal::checkpoint
