#include "device_mesh/process_groups/process_group_factory.h"

#include "device_mesh/collectives/group.h"
#include "device_mesh/internal/accelerator.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "device_mesh/process_groups/backend_table.h"
#include "device_mesh/rendezvous/gloo_connection.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

using c10d::ProcessGroup;
using c10d::ProcessGroupGloo;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

GroupMember member_of(const GlooRequest& request, StorePtr store) {
  GroupMember member;
  member.store = std::move(store);
  member.rank = static_cast<int>(request.index);
  member.size = static_cast<int>(request.ranks.size());
  member.timeout = request.timeout;
  member.name = request.name;
  member.global_ranks = {request.ranks.begin(), request.ranks.end()};
  return member;
}

// Where ranks that do not meet in Gloo would meet.
GlooGroup unconnected(const GlooRequest& request) {
  const auto instance = open_key_space(*request.store, request.key_space, request.opener);
  return {key_space(request.store, request.key_space, instance), {}, {}};
}

void check_is_in_this_build(const std::string& name, const BackendEntry& entry, int64_t rank) {
  TORCH_CHECK_NOT_IMPLEMENTED(entry.is_in_this_build(), "backend '", name,
                              "': this build does not have it; all are ", names_of_backends(),
                              " (rank ", rank, ")");
}

Group assemble(const std::string& name, const BackendEntry& entry, const GlooRequest& request) {
  check_is_in_this_build(name, entry, request.opener);
  const auto gloo = entry.has_gloo ? connect_gloo(request) : unconnected(request);
  const auto member = member_of(request, gloo.store);
  auto group = c10::make_intrusive<ProcessGroup>(member.store, member.rank, member.size);
  const auto type = ProcessGroup::strToBackendType(name);
  if (entry.make) {
    const auto backend = entry.make(member);
    for (const auto device_type : entry.device_types) group->setBackend(device_type, type, backend);
  }
  if (gloo.backend) group->setBackend(c10::kCPU, ProcessGroup::BackendType::GLOO, gloo.backend);
  group->setDefaultBackend(type);
  group->setGroupName(request.name);
  group->setGroupDesc(request.name);
  if (gloo.memory) share_peer_memory(group, gloo.memory);
  return group;
}

// Short for any number of ranks, and different for different lists (64-bit FNV-1a).
std::string digest(const std::vector<int64_t>& ranks) {
  uint64_t hash = 14695981039346656037ull;
  for (const int64_t rank : ranks) hash = (hash ^ static_cast<uint64_t>(rank)) * 1099511628211ull;
  return c10::str(ranks.front(), "+", ranks.size(), ":", hash);
}

GlooDevices gloo_devices_of(const Group& parent) {
  auto backend = parent->getBackend(ProcessGroup::BackendType::GLOO);
  return c10::static_intrusive_pointer_cast<ProcessGroupGloo>(backend)->getOptions()->devices;
}

}  // namespace

GroupRequest::GroupRequest() = default;
GroupRequest::~GroupRequest() = default;

std::string preferred_backend() {
  const auto accelerator = visible_accelerator();
  return accelerator ? backend_for(*accelerator) : "gloo";
}

Group make_world_group(const GroupRequest& request) {
  const auto* const entry = find_backend(request.backend);
  TORCH_CHECK_VALUE(entry != nullptr, "backend '", request.backend, "': allowed are ",
                    names_of_backends(), " (rank ", request.rank, ")");
  GlooRequest made;
  made.store = request.store;
  made.key_space = "world";
  made.opener = request.rank;
  made.name = "world";
  made.ranks.resize(static_cast<size_t>(request.world_size));
  std::iota(made.ranks.begin(), made.ranks.end(), int64_t{0});
  made.index = request.rank;
  made.timeout = request.timeout;
  made.deadline = request.deadline;
  made.advice = request.advice;
  return assemble(request.backend, *entry, made);
}

Group make_subgroup(const Group& parent, const std::vector<int64_t>& parent_ranks,
                    const std::string& purpose) {
  const auto backend = group_backend(parent);
  const auto* const entry = find_backend(backend);
  TORCH_CHECK_NOT_IMPLEMENTED(entry != nullptr, "a group of backend '", backend,
                              "' cannot make further groups; allowed are ", names_of_backends());
  const auto self = std::find(parent_ranks.begin(), parent_ranks.end(), parent->getRank());
  TORCH_INTERNAL_ASSERT(self != parent_ranks.end(), "rank ", parent->getRank(),
                        " is not in the new group");
  const std::vector<int64_t> names = global_ranks(parent);
  GlooRequest made;
  made.store = parent->getStore();
  made.key_space = purpose + "@" + digest(parent_ranks);
  made.opener = parent->getRank();
  made.name = purpose;
  for (const int64_t rank : parent_ranks) made.ranks.push_back(names.at(static_cast<size_t>(rank)));
  made.index = self - parent_ranks.begin();
  made.timeout = parent->getDefaultBackend()->getBackendOptions()->timeout;
  made.deadline = std::chrono::steady_clock::now() + made.timeout;
  made.advice =
      ". All ranks of a group make it, in one order with their other groups: look what these do "
      "instead";
  if (entry->has_gloo) made.devices = gloo_devices_of(parent);
  if (const auto channel = PeerChannel::of(parent)) {
    made.why_gone = [channel, parent_ranks] {
      std::string why;
      for (auto rank = parent_ranks.begin(); rank != parent_ranks.end() && why.empty(); ++rank)
        why = channel->why_gone(*rank);
      return why;
    };
  }
  auto group = assemble(backend, *entry, made);
  inherit_peer_memory(group, parent);
  return group;
}

void connect(const Group& group, c10::Device device) {
  const auto* const entry = find_backend(group_backend(group));
  const bool serves_it = entry != nullptr && entry->connect && serves(group, device.type());
  if (serves_it && group->getSize() > 1) entry->connect(*group->getBackend(device.type()), device);
}

std::vector<int64_t> global_ranks(const Group& group) {
  if (find_backend(group_backend(group)) != nullptr) {
    const auto& told = group->getDefaultBackend()->getBackendOptions()->global_ranks_in_group;
    if (!told.empty()) return {told.begin(), told.end()};
  }
  std::vector<int64_t> ranks(static_cast<size_t>(group->getSize()));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return ranks;
}

void shut_down(const Group& group) {
  const auto* const entry = find_backend(group_backend(group));
  if (entry != nullptr && entry->is_for_devices()) group->waitForPendingWorks();
  leave_peer_memory(group);
  group->shutdown();
}

}  // namespace fsdp::internal
