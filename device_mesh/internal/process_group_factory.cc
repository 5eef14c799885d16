#include "device_mesh/internal/process_group_factory.h"

#include "device_mesh/internal/batch_threads.h"
#include "device_mesh/internal/fake_process_group.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace fsdp::internal {
namespace {

using c10d::Backend;
using c10d::ProcessGroup;
using c10d::ProcessGroupGloo;
using GlooDevices = std::vector<std::shared_ptr<::gloo::transport::Device>>;
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

std::string host_of(const StorePtr& store) {
  c10d::Store* bottom = store.get();
  StorePtr held;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(bottom)) {
    held = prefixed->getUnderlyingNonPrefixStore();
    bottom = held.get();
  }
  if (auto* tcp = dynamic_cast<c10d::TCPStore*>(bottom)) return tcp->getHost();
  return "localhost";
}

// Binds to the loopback address when the rendezvous is there, since a host's own name
// often does not resolve.
GlooDevices open_gloo_devices(const StorePtr& store) {
  const StartsBatchThreads policy;
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME")) {
    return {ProcessGroupGloo::createDeviceForInterface(interface)};
  }
  const std::string host = host_of(store);
  if (host == "localhost" || host == "127.0.0.1")
    return {ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  return {ProcessGroupGloo::createDefaultDevice()};
}

void describe(Backend::Options& options, const Membership& members) {
  options.timeout = members.timeout;
  options.group_name = members.name;
  options.global_ranks_in_group = members.global_ranks;
}

// Gloo returns on a rank as soon as its own connections stand: a rank that then destroyed
// the group closed connections that others had not accepted yet, which failed there.
void await_connections_of_all(const StorePtr& store, const Membership& members) {
  const std::string all = "all_connected";
  if (store->add("connected", 1) == members.size) store->set(all, std::vector<uint8_t>{});
  store->wait({all}, members.timeout);
}

void add_gloo(ProcessGroup& group, const Membership& members, GlooDevices devices) {
  auto options = ProcessGroupGloo::Options::create(members.timeout);
  describe(*options, members);
  options->devices = std::move(devices);
  options->threads = 2;
  auto store = c10::make_intrusive<c10d::PrefixStore>("gloo", members.store);
  auto backend = c10::make_intrusive<ProcessGroupGloo>(store, members.rank, members.size, options);
  await_connections_of_all(store, members);
  group.setBackend(c10::kCPU, ProcessGroup::BackendType::GLOO, backend);
}

#ifdef USE_C10D_NCCL
void add_nccl(ProcessGroup& group, const Membership& members) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  describe(*options, members);
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

Group assemble(const std::string& backend, const Membership& members, GlooDevices devices) {
  auto group = c10::make_intrusive<ProcessGroup>(members.store, members.rank, members.size);
  if (backend == "fake") {
    add_fake(*group, members);
    group->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
  } else if (backend == "nccl") {
    add_nccl(*group, members);
    add_gloo(*group, members, std::move(devices));
    group->setDefaultBackend(ProcessGroup::BackendType::NCCL);
  } else {
    add_gloo(*group, members, std::move(devices));
    group->setDefaultBackend(ProcessGroup::BackendType::GLOO);
  }
  group->setGroupName(members.name);
  group->setGroupDesc(members.name);
  return group;
}

// All members open the groups of one name in the same order, so the n-th call of each
// meets the n-th of the others.
StorePtr open_key_space(const StorePtr& store, const std::string& name, int64_t rank) {
  const int64_t instance = store->add(name + "/opened/" + std::to_string(rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(name + "/" + std::to_string(instance), store);
}

// Short for any number of ranks, and different for different lists (64-bit FNV-1a).
std::string digest(const std::vector<int64_t>& ranks) {
  uint64_t hash = 14695981039346656037ull;
  for (int64_t rank : ranks) hash = (hash ^ static_cast<uint64_t>(rank)) * 1099511628211ull;
  return c10::str(ranks.front(), "+", ranks.size(), ":", hash);
}

GlooDevices shared_gloo_devices(const Group& parent) {
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
  std::vector<uint64_t> ranks(static_cast<size_t>(request.world_size));
  std::iota(ranks.begin(), ranks.end(), uint64_t{0});
  Membership members{open_key_space(request.store, "world", request.rank),
                     static_cast<int>(request.rank),
                     static_cast<int>(request.world_size),
                     request.timeout,
                     "world",
                     std::move(ranks)};
  return assemble(backend, members,
                  backend == "fake" ? GlooDevices{} : open_gloo_devices(request.store));
}

Group make_subgroup(const Group& parent, const std::vector<int64_t>& parent_ranks,
                    const std::string& purpose) {
  const std::string backend = backend_of(parent);
  const auto self = std::find(parent_ranks.begin(), parent_ranks.end(), parent->getRank());
  TORCH_INTERNAL_ASSERT(self != parent_ranks.end(), "rank ", parent->getRank(),
                        " is not in the new group");
  const std::vector<int64_t> names = global_ranks(parent);
  std::vector<uint64_t> ranks;
  for (int64_t rank : parent_ranks)
    ranks.push_back(static_cast<uint64_t>(names.at(static_cast<size_t>(rank))));
  const std::string key = purpose + "@" + digest(parent_ranks);
  Membership members{open_key_space(parent->getStore(), key, parent->getRank()),
                     static_cast<int>(self - parent_ranks.begin()),
                     static_cast<int>(parent_ranks.size()),
                     parent->getDefaultBackend()->getBackendOptions()->timeout,
                     purpose,
                     std::move(ranks)};
  return assemble(backend, members,
                  backend == "fake" ? GlooDevices{} : shared_gloo_devices(parent));
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
