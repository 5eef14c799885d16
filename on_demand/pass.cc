#include "on_demand/pass.h"

#include <c10/core/GradMode.h>
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

}  // namespace fsdp::internal
