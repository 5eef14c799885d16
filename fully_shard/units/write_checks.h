// Whether writes that pass no operator are looked for (fsdp::set_write_checks).
// Process-wide, thread-safe.
#pragma once

namespace fsdp::internal {

bool write_checks();

}  // namespace fsdp::internal
