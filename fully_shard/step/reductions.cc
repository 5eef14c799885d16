#include "fully_shard/step/reductions.h"

#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/step/exchange_after_backward.h"

#include <algorithm>
#include <span>
#include <utility>

namespace fsdp::internal {

void Reductions::touched(FSDPParamGroup& group) {
  group.info().unit().has_children() && reach_ == Reach::kEverywhere ? order_.add(&group)
                                                                     : order_.touched(&group);
}

void Reductions::send_ready() {
  while (auto* const* group =
             order_.next([](FSDPParamGroup* each) { return each->gradients().complete(); })) {
    const RuntimeMode runtime_mode;
    send(**group);
  }
}

// A group's gradients of this backward and those that waited, in rows, one per dtype.
int64_t Reductions::send(FSDPParamGroup& group) {
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

void Reductions::receive_in_flight() {
  if (!in_flight_) return;
  auto reduction = std::move(*in_flight_);
  in_flight_.reset();
  reduction.receive();
  if (!received_.empty()) received_.back().wait_for_replicas();  // at most one is with the replicas
  received_.push_back(std::move(reduction));
}

void Reductions::receive_last() {
  receive_in_flight();
  if (!received_.empty()) received_.back().wait_for_replicas();
}

std::vector<ReducedRow> Reductions::finish(const std::set<std::shared_ptr<Root>>& roots) {
  while (auto* const* group = order_.next_at_end()) send(**group);
  receive_last();
  exchange_on_host(roots, 0);
  send_late(roots);
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
void Reductions::exchange_on_host(const std::set<std::shared_ptr<Root>>& roots, size_t first) {
  if (received_.size() == first) return;
  const bool late =
      exchange_after_backward(roots, std::span(received_).subspan(first), late_ == Late::kSome);
  if (late && reach_ == Reach::kEverywhere) late_ = Late::kSome;
}

// What the last reduction announces. Where others go over the replicas and it does not,
// these must still do the same, so they tell each other.
bool Reductions::is_late_anywhere() const {
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
void Reductions::send_late(const std::set<std::shared_ptr<Root>>& roots) {
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
  exchange_on_host(roots, first);
}

void Reductions::abort() noexcept {
  in_flight_.reset();  // waits; what became of it no longer matters
  received_.clear();
}

}  // namespace fsdp::internal
