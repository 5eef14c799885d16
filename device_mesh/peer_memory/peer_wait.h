// The wait for something that another rank of the host does, as c10d has waits: a message
// that comes, or words in shared memory that change.
#pragma once

#include "device_mesh/peer_memory/peer_memory.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace fsdp::internal {

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
  // Throws where that rank has ended, left or failed, or the time is up; false when it
  // was aborted.
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;

 protected:
  // Whether it is over; takes what came.
  virtual bool finish() = 0;
  // Whether it is over, from another point of view: nothing is taken.
  virtual bool is_over() = 0;
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

 private:
  bool finish() override;
  bool is_over() override;

  const uint64_t number_;
  std::optional<PeerMessage> message_;
};

// Until `condition` holds, which looks at shared memory. Whoever makes it true wakes this
// rank (PeerMemory::wake_others).
class PeerCondition final : public PeerWait {
 public:
  PeerCondition(Options options, std::function<bool()> condition)
      : PeerWait(std::move(options)), condition_(std::move(condition)) {}

 private:
  bool finish() override { return condition_(); }
  bool is_over() override { return condition_(); }

  const std::function<bool()> condition_;
};

}  // namespace fsdp::internal
