#include "device_mesh/internal/process_group_factory.h"

#include "device_mesh/internal/fake_process_group.h"
#include "device_mesh/internal/gloo_connection.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <algorithm>
#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

using c10d::ProcessGroup;
using c10d::ProcessGroupGloo;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// What all backends of one new group share.
struct Membership {
  StorePtr store;  // the group's own key space
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string name;
  std::vector<uint64_t> global_ranks;
};

Membership membership(const GlooRequest& request, StorePtr store) {
  return {std::move(store),
          static_cast<int>(request.index),
          static_cast<int>(request.ranks.size()),
          request.timeout,
          request.name,
          {request.ranks.begin(), request.ranks.end()}};
}

#ifdef USE_C10D_NCCL
void add_nccl(ProcessGroup& group, const Membership& members) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = members.timeout;
  options->group_name = members.name;
  options->global_ranks_in_group = members.global_ranks;
  auto store = c10::make_intrusive<c10d::PrefixStore>("nccl", members.store);
  auto backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store, members.rank, members.size, options);
  group.setBackend(c10::kCUDA, ProcessGroup::BackendType::NCCL, backend);
}
#else
void add_nccl(ProcessGroup&, const Membership&) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "backend 'nccl': this build has no NCCL; allowed: 'gloo', 'fake'");
}
#endif

void add_fake(ProcessGroup& group, const Membership& members) {
  auto backend =
      make_fake_backend(members.rank, members.size, members.timeout, members.global_ranks);
  group.setBackend(c10::kCPU, ProcessGroup::BackendType::CUSTOM, backend);
  group.setBackend(c10::kCUDA, ProcessGroup::BackendType::CUSTOM, backend);
}

Group make_fake(const GlooRequest& request) {
  const auto instance = open_key_space(*request.store, request.key_space, request.opener);
  const auto members = membership(request, key_space(request.store, request.key_space, instance));
  auto group = c10::make_intrusive<ProcessGroup>(members.store, members.rank, members.size);
  add_fake(*group, members);
  group->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
  return group;
}

// With NCCL beside it where that is the backend.
Group make_with_gloo(const std::string& backend, const GlooRequest& request) {
  auto gloo = connect_gloo(request);
  const auto members = membership(request, gloo.store);
  auto group = c10::make_intrusive<ProcessGroup>(members.store, members.rank, members.size);
  if (backend == "nccl") add_nccl(*group, members);
  group->setBackend(c10::kCPU, ProcessGroup::BackendType::GLOO, gloo.backend);
  group->setDefaultBackend(backend == "nccl" ? ProcessGroup::BackendType::NCCL
                                             : ProcessGroup::BackendType::GLOO);
  return group;
}

Group assemble(const std::string& backend, const GlooRequest& request) {
  auto group = backend == "fake" ? make_fake(request) : make_with_gloo(backend, request);
  group->setGroupName(request.name);
  group->setGroupDesc(request.name);
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

std::string backend_of(const Group& group) {
  switch (group->getBackendType()) {
    case ProcessGroup::BackendType::GLOO:
      return "gloo";
    case ProcessGroup::BackendType::NCCL:
      return "nccl";
    default:
      break;
  }
  const std::string name = group->getDefaultBackend()->getBackendName();
  TORCH_CHECK_NOT_IMPLEMENTED(name == "fake", "a group of backend '", name,
                              "' cannot make further groups; allowed: 'gloo', 'nccl', 'fake'");
  return name;
}

}  // namespace

GroupRequest::GroupRequest() = default;
GroupRequest::~GroupRequest() = default;

std::string preferred_backend() {
#ifdef USE_C10D_NCCL
  if (at::globalContext().hasCUDA()) return "nccl";
#endif
  return "gloo";
}

Group make_world_group(const GroupRequest& request) {
  const std::string& backend = request.backend;
  TORCH_CHECK_VALUE(backend == "gloo" || backend == "nccl" || backend == "fake", "backend '",
                    backend, "': allowed are 'gloo', 'nccl' and 'fake' (rank ", request.rank, ")");
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
  made.serves_store = request.serves_store;
  return assemble(backend, made);
}

Group make_subgroup(const Group& parent, const std::vector<int64_t>& parent_ranks,
                    const std::string& purpose) {
  const std::string backend = backend_of(parent);
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
  if (backend != "fake") made.devices = gloo_devices_of(parent);
  return assemble(backend, made);
}

std::vector<int64_t> global_ranks(const Group& group) {
  const auto type = group->getBackendType();
  const bool ours = type == ProcessGroup::BackendType::GLOO ||
                    type == ProcessGroup::BackendType::NCCL ||
                    group->getDefaultBackend()->getBackendName() == "fake";
  if (ours) {
    const auto& told = group->getDefaultBackend()->getBackendOptions()->global_ranks_in_group;
    if (!told.empty()) return {told.begin(), told.end()};
  }
  std::vector<int64_t> ranks(static_cast<size_t>(group->getSize()));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return ranks;
}

void shut_down(const Group& group) {
  if (group->getBackendType() == ProcessGroup::BackendType::NCCL) group->waitForPendingWorks();
  group->shutdown();
}

}  // namespace fsdp::internal
