// The passes that the schedule tells apart: a recomputation belongs to its backward, and
// the forward before it to the training.
#pragma once

#include "on_demand/pass.h"

#include <cstdint>

namespace fsdp::internal {

enum class PassKind : uint8_t { kTraining, kInference, kBackward };

inline PassKind kind_of(Pass pass) {
  if (in_backward(pass)) return PassKind::kBackward;
  return pass == Pass::kInference ? PassKind::kInference : PassKind::kTraining;
}

}  // namespace fsdp::internal
