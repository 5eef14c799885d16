#include "device_mesh/peer_memory/peer_receive.h"

namespace fsdp::internal {

bool PeerReceive::finish() {
  if (!message_) message_ = options().memory->take(options().from, options().channel, number_);
  return message_.has_value();
}

bool PeerReceive::is_over() {
  return options().memory->has_come(options().from, options().channel, number_);
}

}  // namespace fsdp::internal
