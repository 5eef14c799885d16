#include "fully_shard/step/backward_pass.h"

#include "fully_shard/params/param_group.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/transport/wait_clock.h"
#include "fully_shard/units/member_watch.h"
#include "on_demand/pass.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::internal {

// A reduction that has left.
struct BackwardPass::Sent {
  c10::intrusive_ptr<ParamGroup> group;
  GradientBuffer buffer;
  Stamp stamp;
  std::unique_ptr<PendingReduction> pending;
  at::Tensor row;
  std::vector<bool> used;
  bool late = false;

  std::string describe() const { return "reduce-scatter of unit '" + group->name() + "'"; }
};

// Captured by the engine's callback. A backward that throws destroys the callback without
// calling it.
class BackwardPass::EndOfGraphTask {
 public:
  EndOfGraphTask(std::shared_ptr<CommContext> context, int id)
      : context_(std::move(context)), id_(id) {}
  ~EndOfGraphTask() {
    if (!completed_) context_->backward().end_graph_task(id_, /*completed=*/false);
  }
  EndOfGraphTask(const EndOfGraphTask&) = delete;
  void complete() {
    completed_ = true;
    context_->backward().end_graph_task(id_, /*completed=*/true);
  }

 private:
  std::shared_ptr<CommContext> context_;
  int id_;
  bool completed_ = false;
};

BackwardPass::BackwardPass(CommContext& context) : context_(context) {}
BackwardPass::~BackwardPass() = default;

void BackwardPass::note_forward(ParamGroup& group) {
  if (std::exchange(group.notes().touched_in_forward, true)) return;
  forward_order_.push_back(&group);
}

void BackwardPass::note_backward(ParamGroup& group) {
  const int task = current_graph_task();
  if (graph_tasks_.empty() || graph_tasks_.back() != task) {
    if (std::find(graph_tasks_.begin(), graph_tasks_.end(), task) == graph_tasks_.end())
      begin_graph_task(group, task);
  }
  if (std::exchange(group.notes().touched_in_backward, true)) return;
  auto here = std::find(order_.begin(), order_.end(), &group);
  if (here == order_.end()) here = order_.insert(order_.end(), &group);
  group.keep_unsynchronized();
  if (!group.reduces())
    return;  // nothing of it leaves, so it can neither force others nor be the last
  const auto position = static_cast<size_t>(here - order_.begin());
  // What stands two groups before this one leaves now, complete or not: its gradients are
  // as good as done.
  if (position >= 1) forced_ = std::max(forced_, position - 1);
  last_touched_ = std::max(last_touched_, position);
  send_ready();
}

void BackwardPass::begin_graph_task(ParamGroup& group, int task) {
  if (graph_tasks_.empty()) {
    order_.assign(forward_order_.rbegin(), forward_order_.rend());
    next_ = forced_ = last_touched_ = 0;
    late_ = GradientBuffer::Late::kNone;
    accumulates_ = accumulates_everywhere();
  }
  auto end = std::make_shared<EndOfGraphTask>(group.context(), task);
  graph_tasks_.push_back(task);
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->complete(); });
}

void BackwardPass::end_graph_task(int id, bool completed) {
  std::erase(graph_tasks_, id);
  if (!completed) return abort();
  if (graph_tasks_.empty()) finish();
}

void BackwardPass::send_ready() {
  context_.watch([this] {
    for (auto& sent : in_flight_) sent->pending->progress(sent->describe());
  });
  for (; next_ < order_.size(); ++next_) {
    auto& group = *order_[next_];
    // The last reduction tells all ranks whether one of them has late gradients, so it
    // leaves when all have arrived.
    if (next_ >= forced_ && (next_ >= last_touched_ || !group.gradients_complete())) return;
    // A group that took no part so far belongs to another graph; finish() looks at it
    // again.
    if (group.notes().touched_in_backward && !group.notes().sent) send(group);
  }
}

void BackwardPass::send(ParamGroup& group) {
  c10::InferenceMode no_inference(false);
  c10::NoGradGuard no_grad;
  group.notes().sent = true;
  // Zeros where no gradient arrived: on another rank some may have.
  if (accumulates_ && group.notes().touched_in_backward) group.open_buffers();
  group.collect_pending();
  for (auto& buffer : group.take_gradients()) {
    RECORD_FUNCTION("fsdp::reduce_scatter(" + group.name() + ")", {});
    receive_in_flight();  // one at a time bounds the memory
    auto rows = buffer.release_rows(late_);
    auto stamp = context_.stamp_next(group, CollectiveKind::kReduceScatter, rows.numel());
    if (rows.is_cpu()) {
      for (int64_t rank = 1; rank <= rows.size(0); ++rank) {
        std::memcpy(static_cast<char*>(rows.data_ptr()) + rank * rows.size(1) - kStampRoom, &stamp,
                    sizeof stamp);
      }
    }
    const auto dtype = buffer.dtype();
    auto pending = context_.transport().reduce(std::move(rows), dtype);
    context_.account(&Counters::staging_bytes, pending->staging_bytes());
    ++context_.counters().reduce_scatters;
    in_flight_.push_back(
        std::make_unique<Sent>(Sent{c10::intrusive_ptr<ParamGroup>::reclaim_copy(&group),
                                    std::move(buffer),
                                    stamp,
                                    std::move(pending),
                                    {},
                                    {}}));
  }
}

void BackwardPass::receive_in_flight() {
  for (auto& sent : std::exchange(in_flight_, {})) {
    const auto bytes = sent->pending->staging_bytes();
    ReducedRow reduced;
    {
      WaitClock clock(context_.counters());
      const auto pending = std::exchange(sent->pending, nullptr);
      context_.account(&Counters::staging_bytes, -bytes);
      context_.watch([&] { reduced = pending->wait(sent->describe()); });
    }
    context_.check_stamps(sent->stamp, reduced.stamps, sent->group->name());
    sent->used = sent->buffer.used(reduced.row);
    sent->late = sent->buffer.late(reduced.row);
    if (sent->group->divisor() != 1)
      reduced.row.view(sent->buffer.dtype()).div_(sent->group->divisor());
    sent->row = std::move(reduced.row);
    results_.push_back(std::move(sent));
  }
}

void BackwardPass::finish() {
  c10::InferenceMode no_inference(false);
  c10::NoGradGuard no_grad;
  next_ = 0;  // again from the start: some were passed over before they took part
  forced_ = order_.size();
  send_ready();
  // Left by earlier backwards without synchronisation.
  for (auto* group : context_.schedule().groups()) {
    if (!group->notes().sent) send(*group);
  }
  send_late();
  std::erase_if(forward_order_, [](auto* group) { return group->notes().touched_in_backward; });
  for (auto* group : context_.schedule().groups()) {
    if (group->notes().touched_in_backward) group->notes().touched_in_forward = false;
    group->notes().touched_in_backward = group->notes().sent = false;
  }
  order_.clear();
  if (!is_last_backward_) return;
  receive_in_flight();
  publish_results();
  context_.schedule().end_backward();
  context_.raw_writes().raise(context_.rank());
  check_members_are_held(context_.schedule().groups());
}

// Ranks whose graphs differ may differ in what came late: where one has late gradients,
// all reduce once more.
void BackwardPass::send_late() {
  receive_in_flight();
  const bool here = late_ == GradientBuffer::Late::kSome;
  // Without zeros the last reduction need not have left last, and ranks must agree
  // anyway.
  const bool announced = accumulates_ && !results_.empty() && results_.back()->row.is_cpu();
  if (!(announced ? results_.back()->late : here)) return;
  for (auto* group : order_) {
    if (!group->notes().touched_in_backward) continue;
    if (announced) group->open_buffers();
    send(*group);
  }
}

void BackwardPass::publish_results() {
  for (const auto& sent : std::exchange(results_, {})) {
    const auto& params = sent->buffer.params();
    for (size_t i = 0; i < params.size(); ++i) {
      if (!sent->used[i]) continue;
      sent->group->accumulate_gradient(
          params[i].index, sent->buffer.part(sent->row, static_cast<int64_t>(i), context_.rank()));
    }
  }
}

void BackwardPass::abort() noexcept {
  for (auto& sent : std::exchange(in_flight_, {})) {
    context_.account(&Counters::staging_bytes, -sent->pending->staging_bytes());
    sent.reset();  // waits; what became of it no longer matters
  }
  results_.clear();
  for (auto* group : context_.schedule().groups()) {
    group->drop_gradients();
    if (group->notes().sent || group->notes().touched_in_backward) group->drop_pending();
    group->notes() = {};
    group->discard_all_gather();
    group->reshard();
  }
  forward_order_.clear();
  order_.clear();
  context_.schedule().end_backward();
}

void BackwardPass::remove(ParamGroup& group) {
  std::erase(forward_order_, &group);
  const auto here = std::find(order_.begin(), order_.end(), &group);
  if (here == order_.end()) return;
  if (static_cast<size_t>(here - order_.begin()) < next_) --next_;
  order_.erase(here);
}

}  // namespace fsdp::internal
