// What runs the groups of one rank on one process group: it turns touches and gradients
// into gathers, evictions and reductions, asking the roots' schedules and the running
// backward what to do. Lives as long as a group does. One thread at a time.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/params/group_driver.h"
#include "fully_shard/step/backward_run.h"
#include "fully_shard/step/graph_tasks.h"
#include "fully_shard/transport/comm_context.h"
#include "on_demand/open_backward.h"

#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace fsdp::internal {

class Runtime final : public GroupDriver, public std::enable_shared_from_this<Runtime> {
 public:
  // Of the process group that shards over the mesh; made at the first call, which is
  // collective over the mesh.
  static std::shared_ptr<Runtime> of(const DeviceMesh& mesh);
  // Null when no group lives on the mesh. Local.
  static std::shared_ptr<Runtime> find(const DeviceMesh& mesh);

  explicit Runtime(const DeviceMesh& mesh);

  // GroupDriver.
  void touched(FSDPParamGroup& group) override;
  void watch_gradient(const at::Tensor& member, FSDPParamGroup& group, int64_t index) override;
  void gradient_arrived(FSDPParamGroup& group, int64_t index) override;
  void unsharded_by_hand(Unit& unit) override;
  void resharded(Unit& unit) noexcept override;
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

  void settle(FSDPParamGroup& group, Pass pass);
  void touched_in_training(FSDPParamGroup& group);
  void touched_in_backward(FSDPParamGroup& group);
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
  std::optional<ReductionsByUnit> by_unit_;  // where ranks share memory
  OwedReductions<FSDPParamGroup*> owed_;
  GraphTasks graph_tasks_;
  std::optional<BackwardRun> run_;  // of the outermost
  OpenBackward open_backward_;      // while there is a run_
  bool is_on_device_;
  BackwardRun::HeldBack held_back_;
  std::weak_ptr<Root> last_root_;      // of the last touch
  FSDPParamGroup* settled_ = nullptr;  // the group whose touches need nothing
};

}  // namespace fsdp::internal
