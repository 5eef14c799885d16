// What the ranks of one job on one host share: each has memory that the others read, and
// sends them messages that tell what lies there. A message costs some hundred nanoseconds
// and copies nothing but its notice.
//
//   const auto own = std::make_shared<PeerMemory>(rank, world);
//   own->meet(1, invitation);              // what rank 1's invitation() gave
//   own->send(1, {.channel = 7, .number = 0, .notice = notice, .body = rows});
//   const auto got = own->take(1, 7, 0);   // none: it has not come yet
//
// Ranks are processes of one user, or threads of one process. Thread-safe. Nothing here
// is collective. See docs/design/shared_memory.md for how messages and blocks live.
#pragma once

#include "device_mesh/collectives/notice.h"
#include "device_mesh/peer_memory/arena.h"
#include "device_mesh/peer_memory/shared_layout.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

class Peer;

// The number of the message that says that its sender has failed.
inline constexpr uint64_t kFailureNumber = ~uint64_t{0};

struct PeerMessage {
  uint64_t channel = 0;  // of a process group
  uint64_t number = 0;   // in the channel, from one rank to another
  NoticeBytes notice = {};
  // uint8 [bytes], contiguous; undefined: nothing. Of a message to be sent, what
  // as_sent() gave or a part of it, which is not written any more. Of one that came,
  // memory of the sender, which is not used for anything else as long as this tensor
  // lives.
  at::Tensor body = {};
};

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

  // Does not block. Throws c10::Error where there is no memory for it.
  void send(int64_t to, const PeerMessage& message);
  // The message of that number, once; none where it has not come yet.
  std::optional<PeerMessage> take(int64_t from, uint64_t channel, uint64_t number);
  bool has_come(int64_t from, uint64_t channel, uint64_t number);
  // The message of that number is dropped, now or when it comes.
  void drop(int64_t from, uint64_t channel, uint64_t number);
  // Why no further message will come from that rank; empty: one may. Ask before a message
  // is looked for the last time. A system call.
  std::string why_gone(int64_t rank) const;
  // Tells that rank that this one has failed in that channel, and why: whoever waits for
  // a message there waits no more.
  void send_failure(int64_t to, uint64_t channel, const std::string& reason);
  // What that rank told so; empty: nothing.
  std::string failure_of(int64_t from, uint64_t channel);
  // One round of a wait for anything to happen here: the first ones spin, the others
  // sleep until it is rung, 20 ms at most. `is_over` is asked once more before it sleeps.
  void wait_round(int64_t round, c10::function_ref<bool()> is_over);
  bool sleeps_in(int64_t round) const;
  // Ends a wait_round() of another thread.
  void ring();
  // Words that this rank has written are seen by now, and whoever waits for them looks.
  // A system call only for those that sleep.
  void wake_others() const;
  // The bytes of a block of that rank, opened when it is first asked for. Nobody counts
  // it as read: whoever told where it lies keeps it.
  char* block_of(int64_t rank, BlockRef block);
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

}  // namespace fsdp::internal
