// How the ranks of a new job that run on one host come to share memory: each invites the
// others, opens theirs, and tells whether it could. They share it when all could, else
// none of them does, and messages travel over Gloo as between hosts.
//
//   PeerMeeting meeting(rank, world);            // FSDP_PEER_MEMORY=off: invites nobody
//   ... all ranks tell one another meeting.invitation() ...
//   meeting.open(store, invitations);
//   ... all ranks have come here ...
//   const auto memory = meeting.conclude(store);
//
// Does not block. What a rank can not do is a warning, which says what to look at.
#pragma once

#include "device_mesh/peer_memory/peer_memory.h"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace fsdp::internal {

class PeerMeeting {
 public:
  // Throws ValueError as peer_memory_setting().
  PeerMeeting(int64_t rank, int64_t world);

  // One line; empty: this rank shares nothing.
  std::string invitation() const { return memory_ ? memory_->invitation() : ""; }
  // `invitations`: of all ranks of the job.
  void open(c10d::Store& store, const std::vector<std::string>& invitations);
  // Null where this rank shares memory with nobody.
  std::shared_ptr<PeerMemory> conclude(c10d::Store& store);

 private:
  int64_t rank_;
  std::shared_ptr<PeerMemory> memory_;
  std::vector<int64_t> ranks_;  // that share this host, this one included
};

}  // namespace fsdp::internal
