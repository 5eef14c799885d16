#include "device_mesh/collectives/ranks_in_job.h"

#include "device_mesh/internal/weak_registry.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

auto& known_ranks() {
  static auto& instance =
      *new WeakKeyMap<c10::weak_intrusive_ptr<c10d::ProcessGroup>, std::vector<int64_t>>();
  return instance;
}

}  // namespace

void set_ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      std::vector<int64_t> ranks) {
  known_ranks().with(group, [&](std::vector<int64_t>& known) { known = std::move(ranks); });
}

void note_ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::vector<int64_t> ranks) {
  known_ranks().with(group, [&](std::vector<int64_t>& known) {
    if (known.empty()) known = std::move(ranks);
  });
}

std::vector<int64_t> ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (auto known = known_ranks().find(group)) return *std::move(known);
  std::vector<int64_t> own(static_cast<size_t>(group->getSize()));
  std::iota(own.begin(), own.end(), int64_t{0});
  return own;
}

std::string rank_list(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const auto rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace fsdp::internal
