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
#include "device_mesh/peer_memory/peer_meeting.h"
#include "device_mesh/peer_memory/peer_memory.h"
#include "device_mesh/peer_memory/shared_layout.h"
#include "device_mesh/peer_memory/shared_segment.h"

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

// Tells a rank that something has happened.
void ring(ControlPage& page);

class Peer {
 public:
  // `own`: the control segment of rank `own_rank`, this one's.
  Peer(int64_t rank, const SegmentName& control, int64_t own_rank,
       std::shared_ptr<SharedSegment> own);

  // As PeerMemory has them.
  void send(Arena& arena, const PeerMessage& message);
  std::optional<PeerMessage> take(uint64_t channel, uint64_t number);
  bool has_come(uint64_t channel, uint64_t number);
  void drop(uint64_t channel, uint64_t number);
  std::string why_gone() const;
  std::string failure_in(uint64_t channel);
  // Whether it has taken all messages that were sent to it.
  bool has_taken_all();
  void ring() const { internal::ring(control_page(*control_)); }
  // The same where it sleeps, and nothing where not. REQUIRES: a fence since what it is
  // to see was stored.
  void wake() const;
  // Of a block of its memory.
  char* bytes_of(BlockRef block);

 private:
  using Inbox = std::list<PeerMessage>;
  void free_passed(Arena& arena);
  void receive();
  Inbox::iterator find(uint64_t channel, uint64_t number);
  char* at(BlockRef ref);
  std::shared_ptr<SharedSegment> open(uint32_t segment) const;
  at::Tensor body_of(const MessageNode& node);

  const int64_t rank_, own_rank_;
  const ProcessWatch process_;
  const std::shared_ptr<SharedSegment> control_, own_;
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
