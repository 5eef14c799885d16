#include "device_mesh/collectives/words_and_texts.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <sstream>

namespace fsdp::internal {
namespace {

constexpr int64_t kLength = sizeof(int64_t);

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

// Each rank's length and the first `room` bytes of its text.
at::Tensor beginnings_of_all(const std::vector<Collectives>& dims, const TextOptions& options,
                             int64_t room) {
  const auto length = static_cast<int64_t>(options.text.size());
  const auto row = at::zeros({kLength + room}, at::kByte);
  auto* const first = static_cast<char*>(row.mutable_data_ptr());
  std::memcpy(first, &length, sizeof length);
  std::memcpy(first + kLength, options.text.data(), static_cast<size_t>(std::min(length, room)));
  return rows_of_all(dims,
                     {.row = row.to(options.device), .what = options.what, .call = options.call})
      .cpu()
      .contiguous();
}

// One of these, and how long the whole text is.
struct Beginning {
  int64_t length = 0;
  const char* bytes;

  Beginning(const at::Tensor& rows, int64_t place)
      : bytes(static_cast<const char*>(rows.const_data_ptr()) + place * rows.size(1) + kLength) {
    std::memcpy(&length, bytes - kLength, sizeof length);
  }
};

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
  auto rows = beginnings_of_all(dims, options, options.room);
  int64_t longest = 0;
  for (int64_t place = 0; place < rows.size(0); ++place)
    longest = std::max(longest, Beginning(rows, place).length);
  if (longest > options.room) rows = beginnings_of_all(dims, options, longest);
  std::vector<std::string> texts;
  for (int64_t place = 0; place < rows.size(0); ++place) {
    const Beginning text(rows, place);
    texts.emplace_back(text.bytes, static_cast<size_t>(text.length));
  }
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
