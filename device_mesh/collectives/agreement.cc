#include "device_mesh/collectives/agreement.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <sstream>

namespace fsdp::internal {
namespace {

std::optional<WordDifference> first_difference(const at::Tensor& words) {
  const auto* const first = words.const_data_ptr<int64_t>();
  const int64_t ranks = words.size(0), count = words.size(1);
  for (int64_t word = 0; word < count; ++word) {
    for (int64_t rank = 1; rank < ranks; ++rank) {
      if (first[rank * count + word] != first[word])
        return WordDifference{static_cast<size_t>(word), rank};
    }
  }
  return std::nullopt;
}

}  // namespace

at::Tensor rows_of_all(const std::vector<Collectives>& dims, const RowsOptions& options) {
  auto shape = options.row.sizes().vec();
  shape.insert(shape.begin(), -1);
  at::Tensor rows = options.row;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    if (dim->size() > 1)
      rows = dim->rows_of_ranks({.row = rows, .what = options.what, .call = options.call});
  }
  return rows.reshape(shape);
}

Agreement agree(const std::vector<Collectives>& dims, const AgreeOptions& options) {
  const at::Tensor own = at::tensor(options.words, c10::kLong).to(options.device);
  const at::Tensor words =
      rows_of_all(dims, {.row = own, .what = options.what, .call = options.what})
          .cpu()
          .contiguous();
  return {words, first_difference(words)};
}

std::vector<std::string> texts_of_all(const std::vector<Collectives>& dims,
                                      const TextOptions& options) {
  const auto lengths = agree(dims, {.words = {static_cast<int64_t>(options.text.size())},
                                    .what = options.what,
                                    .device = options.device})
                           .words;
  const auto longest = lengths.max().item<int64_t>();
  const auto row = at::zeros({longest}, at::kByte);
  std::memcpy(row.mutable_data_ptr(), options.text.data(), options.text.size());
  const auto rows =
      rows_of_all(dims, {.row = row.to(options.device), .what = options.what}).cpu().contiguous();
  const auto* next = static_cast<const char*>(rows.const_data_ptr());
  std::vector<std::string> texts;
  for (int64_t place = 0; place < lengths.size(0); ++place, next += longest)
    texts.emplace_back(next, static_cast<size_t>(lengths[place][0].item<int64_t>()));
  return texts;
}

DifferentLines different_lines(const std::string& first, const std::string& other) {
  std::istringstream lines_of_first(first), lines_of_other(other);
  DifferentLines lines;
  do {
    if (!std::getline(lines_of_first, lines.first)) lines.first = "nothing more";
    if (!std::getline(lines_of_other, lines.other)) lines.other = "nothing more";
  } while (lines.first == lines.other && (lines_of_first || lines_of_other));
  return lines;
}

}  // namespace fsdp::internal
