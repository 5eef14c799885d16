#include "fully_shard/params/group_info.h"

#include <ATen/ops/empty.h>

#include <utility>

namespace fsdp::internal {

GroupInfo::GroupInfo(DeviceMesh mesh, std::shared_ptr<CommContext> comm_context,
                     std::shared_ptr<Transport> replicas, std::shared_ptr<Unit> unit,
                     std::shared_ptr<GroupDriver> driver)
    : mesh_(std::move(mesh)),
      comm_context_(std::move(comm_context)),
      replicas_(std::move(replicas)),
      unit_(std::move(unit)),
      driver_(std::move(driver)),
      number_(comm_context_->next_unit_number()),
      accounts_(comm_context_, unit_) {}

const std::string& GroupInfo::name() const { return unit_->display_name(); }

ShardGrid GroupInfo::grid() const {
  ShardGrid grid{.inner_ranks = comm_context_->shard_count(),
                 .inner_rank = comm_context_->shard_rank()};
  if (has_pieces()) {
    grid.outer_ranks = replicas_->shard_count();
    grid.outer_rank = replicas_->shard_rank();
  }
  return grid;
}

bool GroupInfo::exchanges_on_host() const {
  const bool among_shards = comm_context_->transport().host_exchange() != nullptr;
  return among_shards || (replicas_ && replicas_->host_exchange() != nullptr);
}

Issue GroupInfo::issue(NoticeWords words, const Communicate* custom) const {
  return {.unit = number_,
          .unit_name = name(),
          .words = words,
          .custom = custom && *custom ? custom : nullptr};
}

std::vector<uint64_t> GroupInfo::words_of_replicas(uint64_t word) const {
  const auto nothing = at::empty({0}, at::TensorOptions().dtype(at::kByte));
  return agreements_in(replicas_->gather(nothing, issue({.agreement = word})).wait().words());
}

std::vector<uint64_t> agreements_in(const std::vector<NoticeWords>& words) {
  std::vector<uint64_t> agreements;
  for (const auto& each : words) agreements.push_back(each.agreement);
  return agreements;
}

}  // namespace fsdp::internal
