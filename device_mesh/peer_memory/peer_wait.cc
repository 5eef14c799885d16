#include "device_mesh/peer_memory/peer_wait.h"

#include <c10/util/Exception.h>

#include <string>

namespace fsdp::internal {

bool PeerWait::wait(std::chrono::milliseconds) {
  if (finish()) return true;
  auto& memory = *options_.memory;
  auto& peer = memory.peer(options_.from);
  const auto until = std::chrono::steady_clock::now() + options_.timeout;
  for (int64_t round = 0;; ++round) {
    const bool slowly = memory.sleeps_in(round);
    const auto gone = slowly ? peer.why_gone() : std::string();
    if (finish()) return true;
    if (aborted_) return false;
    TORCH_CHECK(gone.empty(), gone);
    const auto failure = slowly ? peer.failure_in(options_.channel) : std::string();
    TORCH_CHECK(failure.empty(), "rank ", options_.from, " has failed before: ", failure);
    TORCH_CHECK(!slowly || std::chrono::steady_clock::now() < until, "Timed out waiting ",
                options_.timeout.count(), "ms for rank ", options_.from);
    memory.wait_round(round, [this] { return aborted_ || is_over(); });
  }
}

void PeerWait::abort() {
  aborted_ = true;
  options_.memory->ring();
}

bool PeerReceive::finish() {
  if (!message_) message_ = peer().take(options().channel, number_);
  return message_.has_value();
}

bool PeerReceive::is_over() { return peer().has_come(options().channel, number_); }

}  // namespace fsdp::internal
