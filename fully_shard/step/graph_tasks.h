// The graph tasks of autograd's engine that are open in a backward: the backward's own,
// and within it one for each recomputed region. Local.
#pragma once

#include "device_mesh/internal/device_stream.h"

#include <algorithm>
#include <optional>
#include <vector>

namespace fsdp::internal {

struct GraphTask {
  int id = -1;
  DeviceStream began_on;  // current when it first touched a unit
  // A gradient of a unit arrived in it, not only in the tasks inside it. Only where a
  // leaf ran in a task the engine calls what is queued for its end on the streams of
  // whoever called backward (GraphTask::exec_post_processing of LibTorch's engine.cpp);
  // else it is the default stream of the engine's thread.
  bool has_leaf = false;

  // On which what ends the task belongs; none: the current one.
  std::optional<DeviceStream> end_stream() const {
    return has_leaf ? std::nullopt : std::optional(began_on);
  }
};

class GraphTasks {
 public:
  bool empty() const { return tasks_.empty(); }
  // Null where there is none. Good until the next change.
  GraphTask* find(int id) {
    const auto found = std::find_if(tasks_.begin(), tasks_.end(),
                                    [id](const GraphTask& task) { return task.id == id; });
    return found == tasks_.end() ? nullptr : &*found;
  }
  GraphTask& add(int id, const DeviceStream& began_on) {
    return tasks_.emplace_back(GraphTask{.id = id, .began_on = began_on});
  }
  // Nothing where there is none.
  std::optional<GraphTask> remove(int id) {
    const auto* const found = find(id);
    if (found == nullptr) return std::nullopt;
    const auto removed = *found;
    std::erase_if(tasks_, [id](const GraphTask& task) { return task.id == id; });
    return removed;
  }

 private:
  std::vector<GraphTask> tasks_;  // outermost first
};

}  // namespace fsdp::internal
