// The wait for one message of another rank, which is watched: where ranks wait for one
// another it ends with an error that names all of them (watched_rank.h).
#pragma once

#include "device_mesh/collectives/backend/pending.h"

#include <memory>
#include <string>

namespace fsdp::internal {

class AwaitedOperation;
class IssueLog;

// awaited: what this thread waits in, by a WaitScope; null: nobody watches. Throws as
// Pending::wait() does, and an error with the verdict of the watch.
void await_message(const IssueLog& log, Pending& message,
                   const std::shared_ptr<AwaitedOperation>& awaited, const std::string& what);

}  // namespace fsdp::internal
