// The wait for one message of another rank of the host, as c10d has it.
#pragma once

#include "device_mesh/peer_memory/peer_memory.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

namespace fsdp::internal {

class PeerReceive final : public c10d::Work {
 public:
  PeerReceive(std::shared_ptr<PeerMemory> memory, int64_t from, uint64_t channel, uint64_t number,
              std::chrono::milliseconds timeout);

  bool isCompleted() override;
  // Throws where that rank has ended or left, or the time is up; false when it was
  // aborted.
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;

  // REQUIRES: waited for.
  const PeerMessage& message() const { return *message_; }

 private:
  bool take();

  const std::shared_ptr<PeerMemory> memory_;
  const int64_t from_;
  const uint64_t channel_, number_;
  const std::chrono::milliseconds timeout_;
  std::optional<PeerMessage> message_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace fsdp::internal
