#include "fully_shard/step/backward_run.h"

#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_builder.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/step/prefetch.h"
#include "on_demand/pass.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace fsdp::internal {

BackwardRun::BackwardRun(OwedReductions<FSDPParamGroup*>& owed, HeldBack& held_back)
    : owed_(owed),
      held_back_(held_back),
      reductions_(internal::accumulates_everywhere() ? Reductions::Reach::kEverywhere
                                                     : Reductions::Reach::kInputs) {}

BackwardRun::~BackwardRun() {
  if (state_ == State::kRunning) abort();
}

void BackwardRun::meet(const std::shared_ptr<Root>& root) {
  if (!roots_.insert(root).second || !accumulates_everywhere()) return;
  for (auto* const group : owing_groups_of(root)) reductions_.add(*group);
}

// Those that owe a reduction, in the reverse order of their first forward touches, then
// those that reduce whether they were used or not.
BackwardRun::Groups BackwardRun::owing_groups_of(const std::shared_ptr<Root>& root) const {
  Groups owing;
  const auto owed = owed_.in_order();
  for (auto group = owed.rbegin(); group != owed.rend(); ++group) {
    if ((*group)->info().unit().root() == root && (*group)->gradients().reduces())
      owing.push_back(*group);
  }
  for (const auto& [unit, group] : root->groups()) {
    const bool is_owed = std::find(owing.begin(), owing.end(), group) != owing.end();
    if (group->info().unit().policy.reduce_unused_params && group->gradients().reduces() &&
        !is_owed)
      owing.push_back(group);
  }
  return owing;
}

void BackwardRun::touched(FSDPParamGroup& group) {
  meet(group.info().unit().root());
  if (!part_takers_.insert(&group).second) return;
  if (!group.gradients().settings().synchronizes()) {
    group.gradients().keep_unsynchronized();
    owed_.left_unreduced(&group);
    return;
  }
  if (group.gradients().settings().stays_here() || !accumulates_everywhere() ||
      !group.gradients().reduces())
    return;
  reductions_.touched(group);
  reductions_.send_ready();
}

void BackwardRun::gradient_arrived(FSDPParamGroup& group, int64_t index) {
  touched(group);
  auto& gradients = group.gradients();
  gradients.receive(index);
  if (!gradients.settings().synchronizes()) return gradients.accumulate(index);
  if (gradients.settings().stays_here()) return gradients.pack(index);
  if (!accumulates_everywhere()) reductions_.touched(group);
  if (reductions_.has_left(group)) {
    reductions_.came_late();
    return gradients.accumulate(index);
  }
  gradients.pack(index);
  reductions_.send_ready();
}

void BackwardRun::prefetch_after_gradients(Root& root) {
  const auto by = root.schedule().put_off_by();
  if (!by) return;
  auto* const group = root.group_of(*by);
  if (group != nullptr && reductions_.has_left(*group)) prefetch_put_off(root);
}

bool BackwardRun::finish() {
  const RuntimeMode runtime_mode;
  auto results = reductions_.finish(roots_);
  update_owed();
  publish(std::move(results));
  end_roots();
  state_ = State::kFinished;
  check_afterwards();
  return !reductions_.groups().empty();
}

// Those whose reductions left owe nothing any more.
void BackwardRun::update_owed() {
  for (auto* group : reductions_.groups()) owed_.reduced(group);
  for (auto* group : part_takers_) {
    if (accumulates_everywhere() && group->gradients().settings().synchronizes())
      owed_.reduced(group);
  }
  owed_.backward_ended();
  for (auto* group : part_takers_) group->writes().newest().graph_done();
  for (auto* group : reductions_.groups()) {
    if (group->gradients().keeps_gradients()) owed_.left_unreduced(group);
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
    for (const auto unit : decision.discard) root->groups().at(unit)->unsharded().drop_gather();
    for (const auto unit : decision.evict) root->groups().at(unit)->reshard();
    for (const auto& [unit, group] : root->groups()) {
      group->unsharded().gather_count().backward_ended();
      if (root->is_last_backward()) group->unsharded().drop_part();
      group->unsettle();
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
  reductions_.abort();
  for (const auto& root : roots_) {
    held_back_.erase(root);
    for (const auto& [unit, group] : root->groups()) {
      group->gradients().drop();
      if (part_takers_.contains(group)) group->gradients().drop_accumulated();
      group->writes().newest().graph_done();
      group->unsharded().drop_gather();
      group->reshard();
      if (!group->gradients().keeps_gradients()) owed_.reduced(group);
    }
    root->schedule().backward_ended(/*is_last=*/true);
    for (const auto& [unit, group] : root->groups()) group->unsettle();
  }
}

void BackwardRun::remove(FSDPParamGroup& group) {
  reductions_.remove(group);
  part_takers_.erase(&group);
}

}  // namespace fsdp::internal
