// Looks for unannounced writes while it lives (fsdp::set_write_checks). Process-wide: one
// at a time, outside the ranks' threads.
#pragma once

#include "fully_shard/raw_access.h"

namespace fsdp::testing {

class WriteChecks {
 public:
  explicit WriteChecks(bool on = true) { set_write_checks(on); }
  ~WriteChecks() { set_write_checks(false); }
  WriteChecks(const WriteChecks&) = delete;
};

}  // namespace fsdp::testing
