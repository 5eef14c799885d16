#include "checkpoint/files/raise.h"

#include <c10/util/Exception.h>

#include <string>

namespace fsdp::internal::checkpoint {

absl::Status within(const std::string& what, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), what + ": " + std::string(status.message()));
}

void raise_unless_ok(const absl::Status& status) {
  if (status.ok()) return;
  const std::string text(status.message());
  TORCH_CHECK_VALUE(!absl::IsInvalidArgument(status) && !absl::IsAlreadyExists(status), text);
  TORCH_CHECK(false, text);
}

}  // namespace fsdp::internal::checkpoint
