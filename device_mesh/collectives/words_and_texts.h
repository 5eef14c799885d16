// Words and texts of all ranks, for calls that compare them. (That ranks issue different
// collectives is found in announcement.h; what arguments of one call must have in common
// is compared by on_mesh/claims.h.)
//
//   const auto said = agree({collectives}, {.words = {count, hash}, .what = "agreement of ..."});
//   if (said.difference) TORCH_CHECK_VALUE(false, ...);   // on all ranks alike
#pragma once

#include "device_mesh/collectives/collectives.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

// Every rank's `row`, [ranks, ...], in the order of the ranks of a mesh whose dimensions
// `dims` are, row-major. Collective over these ranks, along one dimension after another,
// the last one first.
at::Tensor rows_of_all(const std::vector<Collectives>& dims, const RowsOptions& options);

struct AgreeOptions {
  std::vector<int64_t> words;      // as many on every rank
  std::string what;                // in errors; the same on every rank
  c10::Device device = c10::kCPU;  // through which they travel
};

// The first word that is not the same on all ranks, and the first rank, by its place,
// that has another one than the first.
struct WordDifference {
  size_t word;
  int64_t rank;
};

struct Agreement {
  at::Tensor words;  // int64 [ranks, words], on the CPU; the same on every rank
  std::optional<WordDifference> difference;
};

// Collective as rows_of_all(). Waits for the device.
Agreement agree(const std::vector<Collectives>& dims, const AgreeOptions& options);

struct TextOptions {
  std::string text;                // any bytes
  std::string what;                // in errors
  std::string call;                // what all ranks must be in, as RowsOptions has it
  c10::Device device = c10::kCPU;  // through which they travel
  int64_t room = 1016;             // bytes of each text that are sent at once
};

// Every rank's text, by place. One collective, as rows_of_all(), where no text is longer
// than `room`, else two. Waits for the device.
std::vector<std::string> texts_of_all(const std::vector<Collectives>& dims,
                                      const TextOptions& options);

// The first lines in which two texts differ; "nothing more" of one that has ended. Local.
struct DifferentLines {
  std::string first, other;
};
DifferentLines different_lines(const std::string& first, const std::string& other);

}  // namespace fsdp::internal
