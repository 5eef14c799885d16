#include "fully_shard/step/runtime.h"

#include "device_mesh/debug.h"
#include "device_mesh/internal/weak_registry.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/step/prefetch.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/units/unit_events.h"
#include "on_demand/pass.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(const at::Tensor& member, c10::intrusive_ptr<FSDPParamGroup> group, int64_t index)
      : group_(std::move(group)), index_(index) {
    if (is_dtensor(member)) letting_go_.emplace(member);
  }
  void operator()(const at::Tensor&) override {
    group_->info().driver().gradient_arrived(*group_, index_);
  }

 private:
  c10::intrusive_ptr<FSDPParamGroup> group_;  // the group knows the member weakly: no cycle
  int64_t index_;
  std::optional<LettingGoOfMeta> letting_go_;  // of a tensor-parallel member
};

auto& runtimes() {
  static auto& instance = *new WeakRegistry<const void*, Runtime>();  // by process group
  return instance;
}

}  // namespace

// Captured by the engine's callback. A backward that throws destroys the callback without
// calling it.
class Runtime::GraphTaskEnd {
 public:
  GraphTaskEnd(std::shared_ptr<Runtime> runtime, int task)
      : runtime_(std::move(runtime)), task_(task) {}
  ~GraphTaskEnd() {
    if (runtime_) runtime_->abort_graph_task(task_);
  }
  GraphTaskEnd(const GraphTaskEnd&) = delete;
  void complete() { std::exchange(runtime_, nullptr)->end_graph_task(task_); }

 private:
  std::shared_ptr<Runtime> runtime_;  // null once completed
  int task_;
};

std::shared_ptr<Runtime> Runtime::find(const DeviceMesh& mesh) {
  return runtimes().find(mesh.group(shard_mesh_dim(mesh)).get());
}

std::shared_ptr<Runtime> Runtime::of(const DeviceMesh& mesh) {
  if (auto runtime = find(mesh)) return runtime;
  const auto made = std::make_shared<Runtime>(mesh);  // collective: not under the lock
  return runtimes().find_or_make(mesh.group(shard_mesh_dim(mesh)).get(), [&] { return made; });
}

Runtime::Runtime(const DeviceMesh& mesh)
    : comm_context_(std::make_shared<CommContext>(mesh)),
      open_backward_(mesh.rank()),
      is_on_device_(mesh.device_type() != c10::kCPU) {
  auto& transport = comm_context_->transport();
  transport.connect_gathers();
  transport.connect_reductions();
}

std::shared_ptr<Transport> Runtime::replicas(const DeviceMesh& mesh, Outer outer) {
  const auto dim = replicate_mesh_dim(mesh);
  if (!dim) return nullptr;
  auto& replicas = replicas_[mesh.group(*dim).get()];
  if (!replicas.transport) {
    replicas.transport = std::make_shared<Transport>(mesh, *dim);
    replicas.transport->connect_reductions();
  }
  if (outer == Outer::kShardOptimizer && !std::exchange(replicas.gathers_are_connected, true))
    replicas.transport->connect_gathers();
  return replicas.transport;
}

std::shared_ptr<Transport> Runtime::neighbours(const DeviceMesh& mesh, int64_t count) {
  auto& transport = neighbours_[{mesh.group(shard_mesh_dim(mesh)).get(), count}];
  if (transport) return transport;
  transport = std::make_shared<Transport>(mesh.neighbours(shard_mesh_dim(mesh), count), 0);
  transport->connect_gathers();
  return transport;
}

void Runtime::make_current(FSDPParamGroup& group) {
  const ExclusiveUse use(comm_context_->user());
  const auto pass = current_pass();
  auto& root = *group.info().unit().root();
  if (debug_options().write_checks) look_for_raw_writes(group);
  group.writes().check_graph_is_current(pass);
  if (in_backward(pass)) {
    begin_graph_task(group);
    run_->come_to(group);
  }
  if (needs_reduction(pass)) {
    pending_.add(&group);
    group.writes().flush_member_writes();
  }
  if (records_gradients(pass)) group.graph_recorded();
  group.unsharded().empty_if_stale();
  const bool is_current = group.unsharded().state().is_unsharded() &&
                          last_root_.lock() == group.info().unit().root() &&
                          root.schedule().is_current(group.info().unit().id, pass);
  if (!is_current) enter(group, pass);
  mark_ready(group, pass);
  tell_unit_observer(&UnitObserver::touched, group.info().unit(), pass);
}

void Runtime::look_for_raw_writes(FSDPParamGroup& group) const {
  group.writes().check_shards_are_announced();
  group.info().unit().root()->raw_writes().raise(comm_context_->global_rank());
}

// From here on a touch of this group needs nothing, until another one is touched.
void Runtime::mark_ready(FSDPParamGroup& group, Pass pass) {
  if (debug_options().write_checks) return;  // every touch looks for writes that nothing announced
  auto& root = *group.info().unit().root();
  for (auto* before : {ready_group_, root.ready_group()}) {
    if (before != nullptr) before->clear_ready();
  }
  ready_group_ = &group;
  root.set_ready_group(group);
  is_on_device_ ? group.mark_ready_but_for_stream(pass) : group.mark_ready(pass);
}

void Runtime::enter(FSDPParamGroup& group, Pass pass) {
  const RuntimeMode runtime_mode;
  auto& root = *group.info().unit().root();
  if (const auto last = last_root_.lock()) prefetch_put_off(*last);
  group.issue_unshard();
  const auto decision = root.schedule().touched(group.info().unit().id, pass);
  warn_of_order_change(root, comm_context_->global_rank());
  apply(root, decision, pass);
  leave_other_roots(group.info().unit().root(), pass);
  group.wait_unshard();
  prefetch(root, decision.prefetch);
  if (group.info().has_pieces()) {
    const auto last = decision.prefetch.empty() ? group.info().unit().id : decision.prefetch.back();
    put_inner_shards_together_ahead(root, last);
  }
  root.raw_writes().raise(comm_context_->global_rank());  // what apply() found
}

void Runtime::apply(Root& root, const Decision& decision, Pass pass) {
  for (const auto unit : decision.drop) root.groups().at(unit)->unsharded().drop_gather();
  for (const auto unit : decision.reshard) {
    auto& group = *root.groups().at(unit);
    in_backward(pass) ? group.reshard() : group.reshard_after_forward();
  }
}

// A root's turn ends when a unit of another root on the process group is touched.
void Runtime::leave_other_roots(const std::shared_ptr<Root>& entered, Pass pass) {
  const auto last = last_root_.lock();
  if (last == entered) return;
  if (last) apply(*last, last->schedule().touched_elsewhere(), pass);
  last_root_ = entered;
}

void Runtime::watch_gradient(const at::Tensor& member, FSDPParamGroup& group, int64_t index) {
  auto watched = c10::intrusive_ptr<FSDPParamGroup>::reclaim_copy(&group);
  torch::autograd::impl::set_post_acc_grad_hooks(
      member, std::make_unique<GradientHook>(member, std::move(watched), index));
}

void Runtime::gradient_arrived(FSDPParamGroup& group, int64_t index) {
  // What is refused must not wait on the member for the next backward.
  if (c10::GradMode::is_enabled() || group.info().unit().is_summoned())
    group.gradients().drop_accumulated();
  TORCH_CHECK_VALUE(
      !c10::GradMode::is_enabled(), "backward(create_graph=true) reached sharded parameter '",
      group.parameter_name(index),
      "': its .grad is reduced over the ranks and has no graph. For gradients that are "
      "differentiated again, take them as values with fsdp::grad(outputs, inputs, ..., "
      "create_graph=true), and run backward() without create_graph (rank ",
      comm_context_->global_rank(), ")");
  TORCH_CHECK_VALUE(!group.info().unit().is_summoned(), "backward through unit '",
                    group.info().name(),
                    "' while a SummonFullParams shows its full parameters in the registry: close "
                    "it first (parameter '",
                    group.parameter_name(index), "', rank ", comm_context_->global_rank(), ")");
  const ExclusiveUse use(comm_context_->user());
  const RuntimeMode runtime_mode;
  begin_graph_task(group).has_leaf = true;
  run_->gradient_arrived(group, index);
  run_->prefetch_after_gradients(*group.info().unit().root());
  tell_unit_observer(&UnitObserver::gradient_arrived, group.info().unit());
}

// The calling thread's, with what is done when it ends.
GraphTask& Runtime::begin_graph_task(const FSDPParamGroup& group) {
  if (!run_) {
    TORCH_CHECK_VALUE(
        !has_unknown_input(),
        "backward(inputs): one of the inputs is in no graph. Registry entries are not (what "
        "parameters() gives); pass members (linear->weight), whose gradients are reduced into the "
        "entries' .grad, or take gradients of entries as values with fsdp::grad (rank ",
        comm_context_->global_rank(), ")");
    run_.emplace(pending_, held_back_);
    open_backward_.begin();
  }
  const auto id = current_graph_task();
  if (auto* const task = graph_tasks_.find(id)) return *task;
  auto end = std::make_shared<GraphTaskEnd>(shared_from_this(), id);
  auto& task = graph_tasks_.add(id, DeviceStream::current(group.shards().member_device()));
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->complete(); });
  return task;
}

void Runtime::end_graph_task(int id) {
  const auto task = graph_tasks_.remove(id);
  if (!graph_tasks_.empty() || !run_) return;
  struct EndOfRun {
    Runtime& runtime;
    ~EndOfRun() { runtime.end_run(); }  // aborts unless it finished
  };
  const EndOfRun end{*this};
  std::optional<CurrentStream> on_end_stream;
  if (const auto stream = task ? task->end_stream() : std::nullopt) on_end_stream.emplace(*stream);
  if (run_->finish()) comm_context_->transport().end_of_backward();
  tell_unit_observer(&UnitObserver::backward_ended);
}

void Runtime::abort_graph_task(int id) noexcept {
  open_backward_.run_here();
  graph_tasks_.remove(id);
  const bool is_outermost = graph_tasks_.empty();
  end_run();
  if (is_outermost) tell_unit_observer(&UnitObserver::backward_aborted);
}

void Runtime::end_run() noexcept {
  run_.reset();
  open_backward_.end();
}

void Runtime::destroyed(FSDPParamGroup& group) noexcept {
  const auto& unit = group.info().unit();
  unit.root()->schedule().emptied(unit.id);
  pending_.reduced(&group);
  for (auto& [root, rows] : held_back_)
    std::erase_if(rows, [&](const ReducedRow& row) { return &row.unit() == &unit; });
  std::erase_if(held_back_, [](const auto& item) { return item.second.empty(); });
  if (run_) run_->remove(group);
  if (ready_group_ == &group) ready_group_ = nullptr;
}

}  // namespace fsdp::internal

namespace fsdp {

Counters counters(const DeviceMesh& mesh) {
  const auto runtime = internal::Runtime::find(mesh);
  return runtime ? runtime->comm_context()->accounts().counters() : Counters{};
}

void reset_peak(const DeviceMesh& mesh) {
  if (const auto runtime = internal::Runtime::find(mesh))
    runtime->comm_context()->accounts().reset_peak();
}

}  // namespace fsdp
