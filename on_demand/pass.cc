#include "on_demand/pass.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

thread_local bool runs_again = false;

}  // namespace

CheckpointedForward::CheckpointedForward() : before_(std::exchange(runs_again, true)) {}
CheckpointedForward::~CheckpointedForward() { runs_again = before_; }

int current_graph_task() { return torch::autograd::get_current_graph_task_id(); }

bool accumulates_everywhere() {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted == nullptr || wanted->empty();
}

bool has_unknown_input() {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr) return false;
  // Torch puts an identity in the place of a leaf that no graph has met.
  return std::any_of(wanted->begin(), wanted->end(), [](const auto& item) {
    return item.second.needed_ && dynamic_cast<const torch::autograd::Identity*>(item.first);
  });
}

Pass current_pass() {
  const bool grad_mode = c10::GradMode::is_enabled();
  if (current_graph_task() != -1) return grad_mode ? Pass::kRecompute : Pass::kBackward;
  if (grad_mode) return Pass::kTraining;
  return runs_again ? Pass::kCheckpointed : Pass::kInference;
}

void OpenBackward::end() noexcept {
  {
    const std::lock_guard lock(mutex_);  // or a thread that is about to wait would miss it
    is_open_.store(false, std::memory_order_release);
  }
  ended_.notify_all();
}

bool OpenBackward::has_failed() const {
  return is_open() && current_graph_task() == -1 &&
         thread_.load(std::memory_order_relaxed) != std::this_thread::get_id();
}

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
