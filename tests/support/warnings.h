// The warnings of a piece of a program, to be looked at.
//
//   const c10::WarningUtils::WarnAlways always;  // process-wide: also those that come once
//   Warnings warnings;
//   fully_shard(model, mesh);
//   EXPECT_THAT(warnings.texts(), IsEmpty());
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace fsdp::testing {

// Takes what this thread warns of while it lives; none of it is printed.
class Warnings final : public c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}
  void process(const c10::Warning& warning) override { texts_.push_back(warning.msg()); }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::vector<std::string> texts_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace fsdp::testing
