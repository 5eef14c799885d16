#include "fully_shard/transport/shared_read.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "device_mesh/peer_memory/peer_receive.h"
#include "fully_shard/transport/shared_block.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::internal {

GatheredRows SharedRead::wait() {
  auto& shards = *shards_;
  version_ = shards.close_version();
  if (by_ == SharedShards::ReadBy::kInPlace && shards.places_.are_in_common()) {
    OwnLine line(shards.own_block());
    shards.versions_.read(line);
  }
  const Source own{static_cast<const char*>(shards.bytes().const_data_ptr()),
                   shards.own_block() + BlockHead::kBytes, shards.said_,
                   shards.places_.are_in_common() && !shards.versions_.is_exposed()};
  sources_.assign(shards.peers_.size() + 1, own);
  for (auto& peer : shards.peers_) sources_[static_cast<size_t>(peer.rank)] = find(peer);
  std::vector<const char*> rows;
  std::vector<NoticeWords> words;
  for (const auto& source : sources_) {
    rows.push_back(source.values);
    words.push_back({.agreement = source.said});
  }
  return {std::move(rows), std::move(words), shards_};
}

std::unique_ptr<ReadInPlace> SharedRead::in_place() const {
  const bool can = by_ == SharedShards::ReadBy::kInPlace &&
                   std::all_of(sources_.begin(), sources_.end(),
                               [](const Source& source) { return source.is_in_common; });
  return can ? std::make_unique<ReadInPlace>(shards_) : nullptr;
}

SharedRead::Source SharedRead::find(SharedShards::Peer& peer) const {
  shards_->await_block(peer);
  const auto& options = shards_->options_;
  PeersLine line(peer.block);
  while (true) {
    const auto seen = look(line, version_);
    switch (seen.found) {
      case Found::kLive:
        return {shards_->places_.at(peer.rank, seen.place), peer.block + BlockHead::kBytes,
                seen.said, ShardPlaces::is_common(seen.place), peer.block};
      case Found::kKept:
        return kept_at(peer.rank, options.channel->block_of(peer.rank, BlockRef(seen.place)),
                       seen.said);
      case Found::kNever:
        report(peer);
      case Found::kNotYet:
        break;
    }
    const auto has_come = [line, version = version_]() mutable {
      return look(line, version).found != Found::kNotYet;
    };
    await_peer(options.gathers, peer.rank, options.channel->wait_until(peer.rank, has_come),
               version_in_words());
  }
}

SharedRead::Source SharedRead::kept_at(int64_t rank, const char* head, uint64_t said) const {
  const auto place = reinterpret_cast<const KeptHead*>(head)->place;
  return {shards_->places_.at(rank, place), head + KeptHead::kBytes, said, /*is_in_common=*/false};
}

// The first operator made them.
std::string SharedRead::version_in_words() const {
  return c10::str(what_, ", as ", version_.count - 1, " write operators made them,");
}

void SharedRead::report(const SharedShards::Peer& peer) const {
  const auto& log = *shards_->options_.gathers.log();
  const PeersLine line(peer.block);
  end_collectives(
      shards_->options_.gathers,
      c10::str(what_, " failed on rank ", log.global_rank(),
               ": the ranks have not written them alike. Rank ", log.global_rank(),
               " wants them as ", version_.count - 1, " write operators made them in ",
               version_.run, " runs of writes; rank ", log.ranks()[static_cast<size_t>(peer.rank)],
               " has begun ", line.load(VersionWord::kBegun) - 1, " in ",
               line.load(VersionWord::kRun),
               " runs. Every rank must write a unit by the same operators, and between two "
               "writes that no backward separates either all ranks read the unit or none"));
}

bool SharedRead::was_right() {
  tables_.assign(sources_.size(), {});
  bool all = true;
  for (size_t rank = 0; rank < sources_.size(); ++rank) {
    const auto& source = sources_[rank];
    if (source.said != shards_->said_ && source.said != 0) {
      auto& table = tables_[rank];
      table.resize(static_cast<size_t>(shards_->options_.shards.table));
      std::memcpy(table.data(), source.table, table.size() * sizeof(uint64_t));
    }
    if (source.live_in == nullptr) continue;
    PeersLine line(source.live_in);
    all = all && still_live(line, version_);
  }
  return all;
}

}  // namespace fsdp::internal
