#include "device_mesh/collectives/backend/point_to_point.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

namespace fsdp::internal {

int tag_of(const Stamp& stamp) {
  constexpr int kMore = kNoticeTag + 1;
  return kMore + static_cast<int>(stamp.history >> 35);  // 29 bits
}

bool better_by_messages(const Group& group, const at::Tensor& memory) {
  return memory.is_cpu() && (group_size(group) == 1 || through_gloo(group, memory));
}

Pending send(const Group& group, at::Tensor bytes, int64_t to, int tag) {
  std::vector<at::Tensor> tensors{std::move(bytes)};
  auto pending = issue(group, [&] { return group->send(tensors, static_cast<int>(to), tag); });
  pending.with_peer(to);
  return pending;
}

Pending receive(const Group& group, at::Tensor bytes, int64_t from, int tag) {
  std::vector<at::Tensor> tensors{std::move(bytes)};
  auto pending = issue(group, [&] { return group->recv(tensors, static_cast<int>(from), tag); });
  pending.with_peer(from);
  return pending;
}

}  // namespace fsdp::internal
