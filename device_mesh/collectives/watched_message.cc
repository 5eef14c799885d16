#include "device_mesh/collectives/watched_message.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/watched_rank.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace fsdp::internal {

void await_message(const IssueLog& log, Pending& message,
                   const std::shared_ptr<AwaitedOperation>& awaited, const std::string& what) {
  const bool is_watched = awaited && message.peer() >= 0;
  if (is_watched) awaited->await(log.ranks()[static_cast<size_t>(message.peer())], message.work());
  const auto has_come = [&] {
    try {
      return message.wait_unless_aborted(what);
    } catch (const c10::Error&) {
      // Another rank may have learned first that this wait can not end, and left.
      if (!is_watched || awaited->verdict().empty()) throw;
      return false;
    }
  };
  if (has_come()) return;
  const auto verdict = is_watched ? awaited->verdict() : std::string();
  TORCH_CHECK(false, verdict.empty() ? "it was aborted" : verdict, ". Nothing was changed by the ",
              what, " on this rank (rank ", log.global_rank(), ")");
}

}  // namespace fsdp::internal
