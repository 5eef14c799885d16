#include "device_mesh/peer_memory/peer_receive.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace fsdp::internal {

PeerReceive::PeerReceive(std::shared_ptr<PeerMemory> memory, int64_t from, uint64_t channel,
                         uint64_t number, std::chrono::milliseconds timeout)
    : memory_(std::move(memory)),
      from_(from),
      channel_(channel),
      number_(number),
      timeout_(timeout) {}

bool PeerReceive::take() {
  if (!message_) message_ = memory_->take(from_, channel_, number_);
  return message_.has_value();
}

bool PeerReceive::isCompleted() { return take(); }

bool PeerReceive::wait(std::chrono::milliseconds) {
  if (take()) return true;
  const auto until = std::chrono::steady_clock::now() + timeout_;
  for (int64_t round = 0;; ++round) {
    const bool slowly = memory_->sleeps_in(round);
    const auto gone = slowly ? memory_->why_gone(from_) : std::string();
    if (take()) return true;
    if (aborted_) return false;
    TORCH_CHECK(gone.empty(), gone);
    const auto failure = slowly ? memory_->failure_of(from_, channel_) : std::string();
    TORCH_CHECK(failure.empty(), "rank ", from_, " has failed before: ", failure);
    TORCH_CHECK(!slowly || std::chrono::steady_clock::now() < until, "Timed out waiting ",
                timeout_.count(), "ms for rank ", from_);
    memory_->wait_round(round,
                        [this] { return aborted_ || memory_->has_come(from_, channel_, number_); });
  }
}

void PeerReceive::abort() {
  aborted_ = true;
  memory_->ring();
}

}  // namespace fsdp::internal
