#include "tests/simulated_accelerator/world.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace fsdp::testing::simulated {

std::string World::unique_name(const Membership& membership) {
  std::ostringstream name;
  name << membership.name << "@";
  for (const auto rank : membership.global_ranks) name << rank << ",";
  const std::lock_guard lock(mutex_);
  const auto before = opened_[name.str() + "/" + std::to_string(membership.rank)]++;
  name << "#" << before;
  return name.str();
}

std::shared_ptr<Rendezvous> World::meet(const Membership& member, const Issue& issue,
                                        const Exchange& exchange) {
  const std::lock_guard lock(mutex_);
  const auto ranks = static_cast<size_t>(member.size);
  const auto global_rank = member.global_ranks.at(static_cast<size_t>(member.rank));
  issued_[global_rank].push_back(member.name + " " + issue.kind + " of " +
                                 std::to_string(issue.bytes) + " bytes");
  auto& meeting = meetings_[{issue.group, issue.number}];
  if (!meeting.rendezvous) {
    meeting.rendezvous = std::make_shared<Rendezvous>(ranks, Operands(ranks), exchange);
    meeting.kind = issue.kind;
  }
  TORCH_CHECK(meeting.kind == issue.kind, "simulated accelerator: collective ", issue.number,
              " of group '", issue.group, "' is ", issue.kind, " on rank ", member.rank, " and ",
              meeting.kind, " on another");
  const auto rendezvous = meeting.rendezvous;
  if (++meeting.arrived == member.size) meetings_.erase({issue.group, issue.number});
  return rendezvous;
}

void World::connected(const Membership& member) {
  const std::lock_guard lock(mutex_);
  connections_[member.global_ranks.at(static_cast<size_t>(member.rank))].push_back(member.name);
}

std::map<uint64_t, std::vector<std::string>> World::connections() {
  const std::lock_guard lock(mutex_);
  return connections_;
}

std::map<uint64_t, std::vector<std::string>> World::issued() {
  const std::lock_guard lock(mutex_);
  return issued_;
}

}  // namespace fsdp::testing::simulated
