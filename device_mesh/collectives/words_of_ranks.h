// Words that the ranks of one mesh dimension show each other, to find out whether they
// have the same.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

// int64 [ranks, words], on the CPU. Every rank gives as many words; `what` they are is
// told in errors. Collective over mesh dimension `dim`: one all-gather.
at::Tensor words_of_ranks(const std::vector<int64_t>& own, const DeviceMesh& mesh, int64_t dim,
                          std::string what);

// The first word that is not the same on all ranks, and the first rank, by its index in
// the dimension, that has another one than rank 0.
struct WordDifference {
  size_t word;
  int64_t index;
};
std::optional<WordDifference> first_difference(const at::Tensor& words);

}  // namespace fsdp::internal
