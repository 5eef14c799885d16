#include "device_mesh/peer_memory/peer_memory_setting.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string_view>

namespace fsdp::internal {

PeerMemorySetting peer_memory_setting() {
  const char* const text = std::getenv("FSDP_PEER_MEMORY");
  const std::string_view value = text == nullptr ? "on" : text;
  if (value == "on") return PeerMemorySetting::kOn;
  if (value == "copy") return PeerMemorySetting::kCopy;
  TORCH_CHECK_VALUE(value == "off", "FSDP_PEER_MEMORY=", value, ": allowed are on, copy and off");
  return PeerMemorySetting::kOff;
}

}  // namespace fsdp::internal
