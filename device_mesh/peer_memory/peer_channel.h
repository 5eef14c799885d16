// The messages of one process group whose ranks share memory. A group has one when it was
// made by our factory, all its ranks run on one host, and its CPU backend is the one that
// it was made with.
//
//   if (const auto channel = PeerChannel::of(group)) {
//     const auto number = channel->next_number();            // the same on all ranks
//     channel->send(1, number, notice, channel->memory().as_sent(rows));
//     auto coming = channel->receive(1, number);             // a c10d::Work
//   }
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/peer_memory/peer_memory.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {

// The wait for something that another rank of the host does, as c10d has waits: a message
// that comes, or words in shared memory that change.
class PeerWait : public c10d::Work {
 public:
  struct Options {
    std::shared_ptr<PeerMemory> memory;
    int64_t from = -1;     // the rank of the job
    uint64_t channel = 0;  // where that rank tells of its failures
    std::chrono::milliseconds timeout{};
  };
  explicit PeerWait(Options options) : options_(std::move(options)) {}

  bool isCompleted() override { return finish(); }
  // Throws where that rank has failed, which tells why, has ended or left, or the time is
  // up; false when it was aborted.
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  // Whether what is waited for has come, which a thread that waits may see later. Takes
  // nothing; thread-safe.
  virtual bool has_come() = 0;

 protected:
  // The same for the thread that waits; takes what came.
  virtual bool finish() = 0;
  const Options& options() const { return options_; }
  Peer& peer() const { return options_.memory->peer(options_.from); }

 private:
  const Options options_;
  std::atomic<bool> aborted_ = false;
};

// Until that message of the rank comes.
class PeerReceive final : public PeerWait {
 public:
  PeerReceive(Options options, uint64_t number) : PeerWait(std::move(options)), number_(number) {}

  // REQUIRES: waited for.
  const PeerMessage& message() const { return *message_; }
  bool has_come() override;

 private:
  bool finish() override;

  const uint64_t number_;
  std::atomic<bool> has_come_ = false;
  std::optional<PeerMessage> message_;
};

// Until `condition` holds, and from then on: it looks at shared memory, from any thread.
// Whoever makes it true wakes this rank (PeerMemory::wake_others).
class PeerCondition final : public PeerWait {
 public:
  PeerCondition(Options options, std::function<bool()> condition)
      : PeerWait(std::move(options)), condition_(std::move(condition)) {}
  bool has_come() override { return condition_(); }

 private:
  bool finish() override { return condition_(); }

  const std::function<bool()> condition_;
};

class PeerChannel {
 public:
  struct Options {
    std::shared_ptr<PeerMemory> memory;
    uint64_t id = 0;             // of the group, among those of the job
    std::vector<int64_t> ranks;  // of the job, by group rank
    std::chrono::milliseconds timeout{};
  };
  explicit PeerChannel(Options options) : options_(std::move(options)) {}

  // Null: its messages travel otherwise. The same answer on all its ranks. Local.
  static std::shared_ptr<PeerChannel> of(const Group& group);

  PeerMemory& memory() const { return *options_.memory; }
  // Of what is sent and received next, once per operation: ranks that issue in the same
  // order give the same numbers.
  uint64_t next_number() { return next_++; }
  // The same of memory that ranks share for longer.
  uint64_t next_shared_number() { return next_shared_++; }
  int64_t size() const { return static_cast<int64_t>(options_.ranks.size()); }
  // As PeerMemory has them; ranks are those of the group.
  std::string why_gone(int64_t rank) const;
  bool has_gone_ranks() const;
  // Tells all others that this rank has failed.
  void send_failure(const std::string& reason) const;
  void send(int64_t to, uint64_t number, const NoticeBytes& notice, const at::Tensor& body) const;
  c10::intrusive_ptr<PeerReceive> receive(int64_t from, uint64_t number) const;
  // Nobody asks for that message any more: it is dropped when it comes.
  void drop(int64_t from, uint64_t number) const;
  // Of words in shared memory that `rank` changes, and then wakes the others.
  c10::intrusive_ptr<c10d::Work> wait_until(int64_t rank, std::function<bool()> condition) const;
  // The bytes of a block of that rank.
  char* block_of(int64_t rank, BlockRef block) const;

 private:
  int64_t in_job(int64_t rank) const { return options_.ranks[static_cast<size_t>(rank)]; }
  Peer& peer(int64_t rank) const { return options_.memory->peer(in_job(rank)); }
  PeerWait::Options wait_options(int64_t rank) const;

  const Options options_;
  std::atomic<uint64_t> next_ = 0, next_shared_ = 0;
};

// Ranks of the group from which nothing will come any more, where that can be seen: its
// ranks share memory.
std::vector<int64_t> gone_peers(const Group& group);

// The ranks of `world`, a new group, use `memory` from now on.
void share_peer_memory(const Group& world, const std::shared_ptr<PeerMemory>& memory);
// `group` was made from `parent`, and uses what that one uses.
void inherit_peer_memory(const Group& group, const Group& parent);
// No further message of this rank will come: where `group` is a world that shares memory,
// PeerMemory::leave(); else nothing.
void leave_peer_memory(const Group& group);

}  // namespace fsdp::internal
