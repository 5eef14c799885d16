// What the ranks of one job on one host share: each has memory that the others read, and
// sends them messages that tell what lies there. A message costs some hundred nanoseconds
// and copies nothing but its notice.
//
//   const auto own = std::make_shared<PeerMemory>(rank, world);
//   own->meet(1, invitation);                    // what rank 1's invitation() gave
//   own->peer(1).send({.channel = 7, .number = 0, .notice = notice, .body = rows});
//   const auto got = own->peer(1).take(7, 0);    // none: it has not come yet
//
// Ranks are processes of one user, or threads of one process. PeerMemory is thread-safe,
// and nothing of it is collective. See docs/design/shared_memory.md for how messages and
// blocks live.
//
// A job's ranks come to share memory by a PeerMeeting, which all of them are in.
#pragma once

#include "device_mesh/peer_memory/arena.h"
#include "device_mesh/peer_memory/peer.h"
#include "device_mesh/peer_memory/shared_layout.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace fsdp::internal {

enum class PeerMemorySetting : uint8_t {
  kOff,   // off: ranks of one host use Gloo, all of them where one says so
  kCopy,  // copy: this rank copies the others' shards, as is better between memory nodes
  kOn,    // on, or no variable: it reads them where they lie, where it can
};

// Throws ValueError for another value. Local.
PeerMemorySetting peer_memory_setting();

class PeerMemory {
 public:
  // Of one rank of a job of `world` ranks. Throws c10::Error where the system has no
  // shared memory for it.
  PeerMemory(int64_t rank, int64_t world);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // A line that tells the others where this rank's memory is.
  const std::string& invitation() const { return invitation_; }
  // Whether two ranks with these invitations could share memory: they run on one host,
  // for one user, and see the same processes. Empty invitations: no.
  static bool are_of_one_host(const std::string& invitation, const std::string& other);
  // Opens the memory of `rank`, before anything is sent to it or taken from it. Throws
  // c10::Error that says what the system refuses.
  void meet(int64_t rank, const std::string& invitation);
  bool has_met(int64_t rank) const { return peers_.contains(rank); }

  // Memory that is sent without a copy: uint8 [bytes], not initialised.
  at::Tensor memory(int64_t bytes) { return arena_->memory(bytes); }
  // `bytes`, uint8, where it lies in memory(), or a contiguous copy there.
  at::Tensor as_sent(const at::Tensor& bytes);

  // REQUIRES: has_met(rank).
  Peer& peer(int64_t rank) const { return *peers_.at(rank); }
  // As that peer has it; where it is gone, others that have ended are named too, since
  // they may be why it has left. REQUIRES: has_met(rank).
  std::string why_gone(int64_t rank) const;
  // One round of a wait for anything to happen here: the first ones spin, the others
  // sleep until it is rung, 20 ms at most. `is_over` is asked once more before it sleeps.
  void wait_round(int64_t round, c10::function_ref<bool()> is_over);
  bool sleeps_in(int64_t round) const;
  // Ends a wait_round() of another thread.
  void ring();
  // Publishes what this rank has written to shared words, and wakes the ranks that wait
  // for them. A system call only for those that sleep.
  void wake_others() const;
  // Where `tensor`, of memory(), lies.
  static BlockRef block_of(const at::Tensor& tensor);
  // `others` stay as long as some rank reads `block`, which was sent; all of memory().
  void keep_while_read(const at::Tensor& block, std::vector<at::Tensor> others);

  // Says that nothing more will come from here, then waits, for two seconds at most,
  // until what was sent has been taken, or its receivers are gone.
  void leave();
  // Does so when the program ends, by the end of main() or exit(), if it has not left.
  static void leave_at_exit(std::weak_ptr<PeerMemory> memory);

 private:
  class AtExit;
  bool say(Whereabouts whereabouts);
  void await_readers();
  ControlPage& page() const;
  void add_segment(const SegmentName& name);
  bool is_all_taken();

  const int64_t rank_;
  const std::shared_ptr<SharedSegment> control_;
  std::shared_ptr<Arena> arena_;
  std::string invitation_;
  std::map<int64_t, std::unique_ptr<Peer>> peers_;  // by rank; complete before the first message
  struct KeptWhileRead {
    at::Tensor block;
    std::vector<at::Tensor> others;
  };
  std::mutex mutex_;
  std::vector<KeptWhileRead> kept_;
};

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
