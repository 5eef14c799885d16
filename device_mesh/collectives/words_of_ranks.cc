#include "device_mesh/collectives/words_of_ranks.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <utility>

namespace fsdp::internal {

at::Tensor words_of_ranks(const std::vector<int64_t>& own, const DeviceMesh& mesh, int64_t dim,
                          std::string what) {
  const at::Tensor mine = at::tensor(own, c10::kLong).to(local_device(mesh));
  const auto count = static_cast<int64_t>(own.size());
  const at::Tensor all = at::empty({mesh.size(dim) * count}, mine.options());
  IssueLog::of(mesh, dim)->run({.kind = CollectiveKind::kAllGather,
                                .what = std::move(what),
                                .bytes = static_cast<int64_t>(mine.nbytes())},
                               [&] { return all_gather(mesh.group(dim), all, mine); });
  return all.cpu().view({mesh.size(dim), count});
}

std::optional<WordDifference> first_difference(const at::Tensor& words) {
  for (int64_t i = 0; i < words.size(1); ++i) {
    const at::Tensor column = words.select(1, i);
    for (int64_t r = 1; r < words.size(0); ++r) {
      if (!column[r].equal(column[0])) return WordDifference{static_cast<size_t>(i), r};
    }
  }
  return std::nullopt;
}

}  // namespace fsdp::internal
