// Whether writes that pass no operator are looked for (fsdp::set_write_checks).
// Process-wide, thread-safe.
#pragma once

namespace fsdp::internal {

bool write_checks();
void enable_write_checks(bool on);

}  // namespace fsdp::internal
