#define XXH_INLINE_ALL
#include "device_mesh/peer_memory/peer_channel.h"

#include "device_mesh/collectives/group.h"
#include "device_mesh/internal/weak_registry.h"
#include "device_mesh/process_groups/process_group_factory.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <xxhash.h>

#include <algorithm>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

enum class Role { kWorld, kPart };

struct OfGroup {
  Role role = Role::kPart;
  std::shared_ptr<PeerMemory> memory;
  std::shared_ptr<PeerChannel> channel;  // null: not all ranks of the group share memory
  const void* backend = nullptr;         // for CPU tensors, when the group was made
};

using OfGroups = WeakKeyMap<c10::weak_intrusive_ptr<c10d::ProcessGroup>, OfGroup>;
OfGroups& of_groups() {
  static auto& groups = *new OfGroups();
  return groups;
}

const void* cpu_backend(const Group& group) { return group->getBackend(c10::kCPU).get(); }

std::shared_ptr<PeerChannel> make_channel(const Group& group,
                                          const std::shared_ptr<PeerMemory>& memory) {
  const auto name = name_in_job(group);
  const auto ranks = global_ranks(group);
  const auto own = ranks[static_cast<size_t>(group_rank(group))];
  const bool are_here = std::all_of(ranks.begin(), ranks.end(), [&](int64_t rank) {
    return rank == own || memory->has_met(rank);
  });
  if (!name || !are_here) return nullptr;
  return std::make_shared<PeerChannel>(
      PeerChannel::Options{.memory = memory,
                           .id = XXH3_64bits(name->group.data(), name->group.size()),
                           .ranks = ranks,
                           .timeout = group->getBackend(c10::kCPU)->getBackendOptions()->timeout});
}

void use(const Group& group, const std::shared_ptr<PeerMemory>& memory, Role role) {
  const bool has_others = group->getSize() > 1;
  OfGroup made{.role = role,
               .memory = memory,
               .channel = has_others ? make_channel(group, memory) : nullptr,
               .backend = cpu_backend(group)};
  of_groups().with(group, [&](OfGroup& known) { known = std::move(made); });
}

}  // namespace

bool PeerWait::wait(std::chrono::milliseconds) {
  if (finish()) return true;
  auto& memory = *options_.memory;
  auto& peer = memory.peer(options_.from);
  const auto until = std::chrono::steady_clock::now() + options_.timeout;
  for (int64_t round = 0;; ++round) {
    const bool slowly = memory.sleeps_in(round);
    const auto gone = slowly ? memory.why_gone(options_.from) : std::string();
    if (finish()) return true;
    if (aborted_) return false;
    // First, since a rank that has failed leaves, and its reason says more.
    const auto failure = slowly ? peer.failure_in(options_.channel) : std::string();
    TORCH_CHECK(failure.empty(), "rank ", options_.from, " has failed before: ", failure);
    TORCH_CHECK(gone.empty(), gone);
    TORCH_CHECK(!slowly || std::chrono::steady_clock::now() < until, "Timed out waiting ",
                options_.timeout.count(), "ms for rank ", options_.from);
    memory.wait_round(round, [this] { return aborted_ || has_come(); });
  }
}

void PeerWait::abort() {
  aborted_ = true;
  options_.memory->ring();
}

bool PeerReceive::finish() {
  if (!message_ && has_come()) message_ = peer().take(options().channel, number_);
  return message_.has_value();
}

bool PeerReceive::has_come() {
  if (!has_come_) has_come_ = peer().has_come(options().channel, number_);
  return has_come_;
}

std::shared_ptr<PeerChannel> PeerChannel::of(const Group& group) {
  const auto known = of_groups().find(group);
  if (!known || !known->channel || known->backend != cpu_backend(group)) return nullptr;
  return known->channel;
}

std::string PeerChannel::why_gone(int64_t rank) const {
  return options_.memory->has_met(in_job(rank)) ? memory().why_gone(in_job(rank)) : "";
}

bool PeerChannel::has_gone_ranks() const {
  for (int64_t rank = 0; rank < size(); ++rank) {
    if (!why_gone(rank).empty()) return true;
  }
  return false;
}

void PeerChannel::send_failure(const std::string& reason) const {
  for (const auto rank : options_.ranks) {
    if (options_.memory->has_met(rank))
      options_.memory->peer(rank).send_failure(options_.id, reason);
  }
}

std::vector<int64_t> gone_peers(const Group& group) {
  std::vector<int64_t> gone;
  const auto channel = PeerChannel::of(group);
  for (int64_t rank = 0; channel && rank < channel->size(); ++rank) {
    if (!channel->why_gone(rank).empty()) gone.push_back(rank);
  }
  return gone;
}

void PeerChannel::send(int64_t to, uint64_t number, const NoticeBytes& notice,
                       const at::Tensor& body) const {
  peer(to).send({.channel = options_.id, .number = number, .notice = notice, .body = body});
}

c10::intrusive_ptr<PeerReceive> PeerChannel::receive(int64_t from, uint64_t number) const {
  return c10::make_intrusive<PeerReceive>(wait_options(from), number);
}

void PeerChannel::drop(int64_t from, uint64_t number) const {
  peer(from).drop(options_.id, number);
}

c10::intrusive_ptr<c10d::Work> PeerChannel::wait_until(int64_t rank,
                                                       std::function<bool()> condition) const {
  return c10::make_intrusive<PeerCondition>(wait_options(rank), std::move(condition));
}

PeerWait::Options PeerChannel::wait_options(int64_t rank) const {
  return {.memory = options_.memory,
          .from = in_job(rank),
          .channel = options_.id,
          .timeout = options_.timeout};
}

char* PeerChannel::block_of(int64_t rank, BlockRef block) const {
  return peer(rank).bytes_of(block);
}

void share_peer_memory(const Group& world, const std::shared_ptr<PeerMemory>& memory) {
  use(world, memory, Role::kWorld);
  PeerMemory::leave_at_exit(memory);
}

void inherit_peer_memory(const Group& group, const Group& parent) {
  const auto known = of_groups().find(parent);
  if (known) use(group, known->memory, Role::kPart);
}

void leave_peer_memory(const Group& group) {
  const auto known = of_groups().find(group);
  if (known && known->role == Role::kWorld) known->memory->leave();
}

}  // namespace fsdp::internal
