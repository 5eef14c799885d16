// What runs the groups of one rank on one process group: it turns touches and gradients
// into gathers, reshards and reductions, asking the roots' schedules and the running
// backward what to do. Lives as long as a group does. One thread at a time.
#pragma once

#include "device_mesh/device_mesh.h"
#include "device_mesh/internal/accelerator.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/step/backward_run.h"
#include "fully_shard/transport/comm_context.h"
#include "on_demand/pass.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::internal {

// The graph tasks of autograd's engine that are open in a backward: the backward's own,
// and within it one for each recomputed region. Local.
struct GraphTask {
  int id = -1;
  DeviceStream began_on;  // current when it first touched a unit
  // A gradient of a unit arrived in this task itself, not only in a nested one. Only then
  // does the engine call what is queued for its end on the streams of whoever called
  // backward (GraphTask::exec_post_processing of LibTorch's engine.cpp); else on the
  // default stream of its own thread.
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

class Runtime final : public GroupDriver, public std::enable_shared_from_this<Runtime> {
 public:
  // Of the process group that shards over the mesh; made at the first call, which is
  // collective over the mesh.
  static std::shared_ptr<Runtime> of(const DeviceMesh& mesh);
  // Null when no group lives on the mesh. Local.
  static std::shared_ptr<Runtime> find(const DeviceMesh& mesh);

  explicit Runtime(const DeviceMesh& mesh);

  // GroupDriver.
  void make_current(FSDPParamGroup& group) override;
  void watch_gradient(const at::Tensor& member, FSDPParamGroup& group, int64_t index) override;
  void gradient_arrived(FSDPParamGroup& group, int64_t index) override;
  void destroyed(FSDPParamGroup& group) noexcept override;
  OpenBackward* open_backward() override { return is_on_device_ ? &open_backward_ : nullptr; }

  const std::shared_ptr<CommContext>& comm_context() const { return comm_context_; }
  // To the ranks along the other dimension of the mesh; null where there are none.
  // Collective over them the first time that it has this meaning.
  std::shared_ptr<Transport> replicas(const DeviceMesh& mesh, Outer outer);
  // To the `count` neighbours that share what forwards leave (to_world(count)).
  // Collective over the ranks that shard the first time.
  std::shared_ptr<Transport> neighbours(const DeviceMesh& mesh, int64_t count);

 private:
  class GraphTaskEnd;

  void look_for_raw_writes(FSDPParamGroup& group) const;
  void mark_ready(FSDPParamGroup& group, Pass pass);
  void enter(FSDPParamGroup& group, Pass pass);
  void leave_other_roots(const std::shared_ptr<Root>& entered, Pass pass);
  void apply(Root& root, const Decision& decision, Pass pass);
  GraphTask& begin_graph_task(const FSDPParamGroup& group);
  void end_graph_task(int id);
  void abort_graph_task(int id) noexcept;
  void end_run() noexcept;

  std::shared_ptr<CommContext> comm_context_;
  struct Replicas {
    std::shared_ptr<Transport> transport;
    bool gathers_are_connected = false;
  };
  std::map<const void*, Replicas> replicas_;  // by process group
  std::map<std::pair<const void*, int64_t>, std::shared_ptr<Transport>> neighbours_;
  PendingReductions<FSDPParamGroup*> pending_;
  GraphTasks graph_tasks_;
  std::optional<BackwardRun> run_;  // of the outermost
  OpenBackward open_backward_;      // while there is a run_
  bool is_on_device_;
  BackwardRun::HeldBack held_back_;
  std::weak_ptr<Root> last_root_;          // of the last touch
  FSDPParamGroup* ready_group_ = nullptr;  // the group whose touches need nothing
};

}  // namespace fsdp::internal
