// The wait for one message of another rank of the host.
#pragma once

#include "device_mesh/peer_memory/peer_memory.h"
#include "device_mesh/peer_memory/peer_wait.h"

#include <cstdint>
#include <optional>
#include <utility>

namespace fsdp::internal {

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

}  // namespace fsdp::internal
