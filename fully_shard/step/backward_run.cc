#include "fully_shard/step/backward_run.h"

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_builder.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/step/prefetch.h"
#include "on_demand/pass.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

namespace fsdp::internal {

BackwardRun::BackwardRun(PendingReductions<FSDPParamGroup*>& pending, HeldBack& held_back)
    : pending_(pending),
      held_back_(held_back),
      reach_(accumulates_everywhere() ? Reach::kEverywhere : Reach::kInputs) {}

BackwardRun::~BackwardRun() {
  if (state_ == State::kRunning) abort();
}

void BackwardRun::meet(const std::shared_ptr<Root>& root) {
  if (!roots_.insert(root).second || reach_ == Reach::kInputs) return;
  for (auto* const group : groups_to_reduce(root)) order_.add(group);
}

// Those whose reduction is pending, in the reverse order of their first forward touches,
// then those that reduce whether they were used or not.
BackwardRun::Groups BackwardRun::groups_to_reduce(const std::shared_ptr<Root>& root) const {
  Groups groups;
  const auto pending = pending_.in_order();
  for (auto group = pending.rbegin(); group != pending.rend(); ++group) {
    if ((*group)->info().unit().root() == root && (*group)->gradients().reduces())
      groups.push_back(*group);
  }
  for (const auto& [unit, group] : root->groups()) {
    const bool is_pending = std::find(groups.begin(), groups.end(), group) != groups.end();
    if (group->info().unit().policy.reduce_unused_params && group->gradients().reduces() &&
        !is_pending)
      groups.push_back(group);
  }
  return groups;
}

void BackwardRun::come_to(FSDPParamGroup& group) {
  meet(group.info().unit().root());
  if (!part_takers_.insert(&group).second) return;
  if (!group.info().unit().policy.synchronize_gradients) {
    group.gradients().keep_unsynchronized();
    pending_.left_unreduced(&group);
    return;
  }
  if (group.gradients().settings().stays_here() || reach_ == Reach::kInputs ||
      !group.gradients().reduces())
    return;
  add_to_order(group);
  send_ready();
}

void BackwardRun::gradient_arrived(FSDPParamGroup& group, int64_t index) {
  come_to(group);
  auto& gradients = group.gradients();
  gradients.receive(index);
  if (!group.info().unit().policy.synchronize_gradients) return gradients.accumulate(index);
  if (gradients.settings().stays_here()) return gradients.pack(index);
  if (reach_ == Reach::kInputs) add_to_order(group);
  if (order_.has_left(&group)) {
    late_ = Late::kSome;
    return gradients.accumulate(index);
  }
  gradients.pack(index);
  send_ready();
}

void BackwardRun::prefetch_after_gradients(Root& root) {
  const auto by = root.schedule().put_off_by();
  if (!by) return;
  auto* const group = root.group_of(*by);
  if (group != nullptr && order_.has_left(group)) prefetch_put_off(root);
}

// To a group that takes part. Reaching one with units below it does not force those
// before it to leave: their gradients may still come.
void BackwardRun::add_to_order(FSDPParamGroup& group) {
  group.info().unit().has_children() && reach_ == Reach::kEverywhere ? order_.add(&group)
                                                                     : order_.come_to(&group);
}

void BackwardRun::send_ready() {
  while (auto* const* group =
             order_.next([](FSDPParamGroup* each) { return each->gradients().complete(); })) {
    const RuntimeMode runtime_mode;
    send(**group);
  }
}

// A group's gradients of this backward and those that waited, in rows, one per dtype.
int64_t BackwardRun::send(FSDPParamGroup& group) {
  auto& gradients = group.gradients();
  gradients.open();  // zeros where no gradient arrived: on another rank some may have
  gradients.pack_accumulated();
  auto inputs = gradients.take();
  for (auto& input : inputs) {
    receive_in_flight();
    in_flight_.emplace(c10::intrusive_ptr<FSDPParamGroup>::reclaim_copy(&group), std::move(input));
    in_flight_->send(late_);
  }
  return static_cast<int64_t>(inputs.size());
}

void BackwardRun::receive_in_flight() {
  if (!in_flight_) return;
  auto reduction = std::move(*in_flight_);
  in_flight_.reset();
  reduction.receive();
  if (!received_.empty()) received_.back().wait_for_replicas();  // at most one is with the replicas
  received_.push_back(std::move(reduction));
}

void BackwardRun::receive_last() {
  receive_in_flight();
  if (!received_.empty()) received_.back().wait_for_replicas();
}

// What all groups have brought, but for what is kept with its group.
std::vector<ReducedRow> BackwardRun::receive_all() {
  while (auto* const* group = order_.next_at_end()) send(**group);
  receive_last();
  exchange_on_host(0);
  send_late();
  // Only now, when all that this backward issues has been waited for.
  for (auto& reduction : received_) reduction.check_replica_writes();
  for (auto& reduction : received_) reduction.keep_unless_over_replicas();
  std::vector<ReducedRow> rows;
  for (auto& reduction : std::exchange(received_, {})) {
    if (auto row = std::move(reduction).result()) rows.push_back(std::move(*row));
  }
  return rows;
}

// On devices the ranks tell each other what travels with collectives on the CPU, of the
// reductions from `first` on.
void BackwardRun::exchange_on_host(size_t first) {
  if (received_.size() == first) return;
  if (!received_[first].group().info().exchanges_on_host()) return;
  const bool late =
      exchange_after_backward(roots_, std::span(received_).subspan(first), late_ == Late::kSome);
  if (late && reach_ == Reach::kEverywhere) late_ = Late::kSome;
}

// What the last reduction announces. Where others go over the replicas and it does not,
// the replicas tell each other, so that all go on alike.
bool BackwardRun::is_late_anywhere() const {
  const auto& last = received_.back();
  const bool late = last.announces_late();
  const bool some_go_on =
      std::any_of(received_.begin(), received_.end(),
                  [](const auto& reduction) { return reduction.is_over_replicas(); });
  if (!some_go_on || last.is_over_replicas() || last.group().info().replicas() == nullptr)
    return late;
  const auto told = last.group().info().words_of_replicas(late);
  return std::find(told.begin(), told.end(), uint64_t{true}) != told.end();
}

// Ranks whose graphs differ may differ in what came late: where one has late gradients,
// all reduce once more.
void BackwardRun::send_late() {
  // A backward of some inputs only sends what it has, so nothing was announced.
  const bool announced = reach_ == Reach::kEverywhere && !received_.empty() &&
                         received_.back().group().info().comm_context().transport().reads_flags();
  const bool some = announced ? is_late_anywhere() : late_ == Late::kSome;
  if (!some) return;
  late_ = Late::kNone;
  const auto first = received_.size();
  for (auto* group : order_.groups())
    group->info().accounts().add(&Counters::late_reduce_scatters, send(*group));
  receive_last();
  exchange_on_host(first);
}

bool BackwardRun::finish() {
  const RuntimeMode runtime_mode;
  auto results = receive_all();
  update_pending();
  publish(std::move(results));
  end_roots();
  state_ = State::kFinished;
  check_afterwards();
  return !order_.groups().empty();
}

// Of those that left nothing is pending any more.
void BackwardRun::update_pending() {
  for (auto* group : order_.groups()) pending_.reduced(group);
  for (auto* group : part_takers_) {
    if (reach_ == Reach::kEverywhere && group->info().unit().policy.synchronize_gradients)
      pending_.reduced(group);
  }
  pending_.backward_ended();
  for (auto* group : part_takers_) group->writes().newest().graph_done();
  for (auto* group : order_.groups()) {
    if (group->gradients().keeps_gradients()) pending_.left_unreduced(group);
  }
}

void BackwardRun::publish(std::vector<ReducedRow> results) {
  for (auto& row : results) held_back_[row.unit().root()].push_back(std::move(row));
  std::vector<ReducedRow> rows;
  for (const auto& root : roots_) {
    if (!root->is_last_backward()) continue;
    for (const auto& [unit, group] : root->groups()) group->gradients().publish_what_stayed();
    auto results = held_back_.extract(root);
    if (!results.empty())
      std::move(results.mapped().begin(), results.mapped().end(), std::back_inserter(rows));
  }
  CopiesToHost copies;
  for (auto& row : rows) row.bring_home(copies);
  copies.wait();  // the only wait of the host in a step, with OffloadPolicy
  for (auto& row : rows) row.publish();
}

void BackwardRun::end_roots() {
  for (const auto& root : roots_) {
    prefetch_put_off(*root);
    const auto decision = root->schedule().backward_ended(root->is_last_backward());
    for (const auto unit : decision.drop) root->groups().at(unit)->unsharded().drop_gather();
    for (const auto unit : decision.reshard) root->groups().at(unit)->reshard();
    for (const auto& [unit, group] : root->groups()) {
      group->unsharded().gather_count().backward_ended();
      if (root->is_last_backward()) group->unsharded().drop_part();
      group->clear_ready();
    }
  }
}

void BackwardRun::check_afterwards() const {
  for (const auto& root : roots_) {
    for (const auto& [unit, group] : root->groups()) {
      root->raw_writes().raise(group->info().rank());
      check_members_are_held(*group);
    }
    if (!root->groups().empty()) check_no_late_parameters(*root->groups().begin()->second);
  }
}

void BackwardRun::abort() noexcept {
  in_flight_.reset();  // waits; what became of it no longer matters
  received_.clear();
  for (const auto& root : roots_) {
    held_back_.erase(root);
    for (const auto& [unit, group] : root->groups()) {
      group->gradients().drop();
      if (part_takers_.contains(group)) group->gradients().drop_accumulated();
      group->writes().newest().graph_done();
      group->unsharded().drop_gather();
      group->reshard();
      if (!group->gradients().keeps_gradients()) pending_.reduced(group);
    }
    root->schedule().backward_ended(/*is_last=*/true);
    for (const auto& [unit, group] : root->groups()) group->clear_ready();
  }
}

void BackwardRun::remove(FSDPParamGroup& group) {
  order_.remove(&group);
  part_takers_.erase(&group);
}

}  // namespace fsdp::internal
