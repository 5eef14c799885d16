#include "on_demand/open_backward.h"

#include "on_demand/pass.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

void OpenBackward::end() noexcept {
  {
    const std::lock_guard lock(mutex_);  // or a thread that is about to wait would miss it
    is_open_.store(false, std::memory_order_release);
  }
  ended_.notify_all();
}

bool OpenBackward::has_failed() const { return is_open() && current_graph_task() == -1; }

void OpenBackward::await_end(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  const bool has_ended = ended_.wait_for(lock, limit, [this] { return !is_open(); });
  TORCH_CHECK(has_ended, "waited ", limit.count(),
              " ms for the end of a backward that uses the same sharded parameters: another "
              "thread is in one. Let one thread at a time run forward and backward of modules "
              "that share a mesh (rank ",
              global_rank_, ")");
}

}  // namespace fsdp::internal
