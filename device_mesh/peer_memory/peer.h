// Another rank of this host, as one rank sees it: its memory, whether it is there, and
// the messages to it and from it.
//
// Each direction is a list in the memory of the sender, to which it adds and from which
// the receiver takes; nobody waits for the other, and there is no limit but memory. The
// sender frees a message when the receiver has taken the next one (the queue of Michael
// and Scott, "Simple, fast, and practical non-blocking and blocking concurrent queue
// algorithms", 1996, of one sender and one receiver).
#pragma once

#include "device_mesh/peer_memory/arena.h"
#include "device_mesh/peer_memory/shared_layout.h"
#include "device_mesh/peer_memory/shared_segment.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {

// The first bytes of a control segment behind its header, and the lanes behind them.
ControlPage& control_page(const SharedSegment& control);
MessageLane& lane_to(const SharedSegment& control, int64_t rank);
size_t control_bytes(int64_t world);

// Tells a rank that something has happened: wakes all its threads that sleep, in any
// process.
void ring(ControlPage& page);
// Returns when the bell is rung, at once when it is no longer as `seen`, and after
// `at_most`; also for no reason. Linux only.
void sleep_until_rung(const ControlPage& page, uint32_t seen, std::chrono::milliseconds at_most);

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

// Whether a process of this host has ended, killed or not, even while nobody has waited
// for it: by a pidfd, which stays with that process when its number is used again.
class ProcessWatch {
 public:
  // Of this process itself there is nothing to watch. Throws c10::Error where there is no
  // such process.
  explicit ProcessWatch(int64_t pid);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  int64_t pid() const { return pid_; }
  bool has_ended() const { return ends_within(std::chrono::milliseconds(0)); }  // a system call
  // Waits for it.
  bool ends_within(std::chrono::milliseconds limit) const;

 private:
  int64_t pid_;
  int fd_ = -1;
};

class Peer {
 public:
  // `own`: the control segment of rank `own_rank`, this one's, which sends from `arena`.
  Peer(int64_t rank, const SegmentName& control, int64_t own_rank,
       std::shared_ptr<SharedSegment> own, std::shared_ptr<Arena> arena);

  // Does not block. Throws c10::Error where there is no memory for it.
  void send(const PeerMessage& message);
  // The message of that number, once; none where it has not come yet.
  std::optional<PeerMessage> take(uint64_t channel, uint64_t number);
  bool has_come(uint64_t channel, uint64_t number);
  // The message of that number is dropped, now or when it comes.
  void drop(uint64_t channel, uint64_t number);
  // Why no further message will come from that rank; empty: one may. Ask before a message
  // is looked for the last time. A system call.
  std::string why_gone() const;
  // Whether its program has ended, killed or not, before it left. A system call.
  bool has_ended() const;
  // Tells that rank that this one has failed in that channel, and why: whoever waits for
  // a message there waits no more.
  void send_failure(uint64_t channel, const std::string& reason);
  // What that rank told so; empty: nothing.
  std::string failure_in(uint64_t channel);
  // Whether it has taken all messages that were sent to it.
  bool has_taken_all();
  void ring() const { internal::ring(control_page(*control_)); }
  // The same where it sleeps, and nothing where not. REQUIRES: a fence since what it is
  // to see was stored.
  void wake() const;
  // The bytes of a block of its memory, opened when it is first asked for. Nobody counts
  // it as read: whoever told where it lies keeps it.
  char* bytes_of(BlockRef block);

 private:
  using Inbox = std::list<PeerMessage>;
  Whereabouts whereabouts() const;
  void free_passed();
  void receive();
  Inbox::iterator find(uint64_t channel, uint64_t number);
  char* at(BlockRef ref);
  std::shared_ptr<SharedSegment> open(uint32_t segment) const;
  at::Tensor body_of(const MessageNode& node);

  const int64_t rank_, own_rank_;
  const ProcessWatch process_;
  const std::shared_ptr<SharedSegment> control_, own_;
  const std::shared_ptr<Arena> arena_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<SharedSegment>> segments_;  // of its memory, as far as needed

  std::deque<Arena::Block> sent_;  // messages that it may still look at, oldest first
  uint64_t freed_ = 0;             // before those
  MessageNode* last_sent_ = nullptr;

  MessageNode* last_received_ = nullptr;
  uint64_t passed_ = 0;
  Inbox inbox_;                                       // received, and not taken
  std::set<std::pair<uint64_t, uint64_t>> unwanted_;  // channels and numbers; have not come
};

}  // namespace fsdp::internal
