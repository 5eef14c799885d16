// Looks for unannounced writes while it lives (DebugOptions::write_checks). Process-wide:
// one at a time, outside the ranks' threads.
#pragma once

#include "device_mesh/debug.h"

namespace fsdp::testing {

class WriteChecks {
 public:
  explicit WriteChecks(bool on = true) { set_debug_options({.write_checks = on}); }
  ~WriteChecks() { set_debug_options({}); }
  WriteChecks(const WriteChecks&) = delete;
};

}  // namespace fsdp::testing
