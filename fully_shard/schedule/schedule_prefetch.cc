// What a schedule gathers ahead, and drops when it was in vain.
#include "fully_shard/schedule/schedule.h"

#include <utility>

namespace fsdp::internal {
namespace {

// How many units are gathered ahead of the one that is entered.
constexpr int64_t kDepth = 1;

}  // namespace

void Schedule::set_prefetch_list(UnitId unit, bool backward, std::vector<UnitId> units) {
  std::erase_if(units, [&](UnitId other) { return !units_.contains(other) || other == unit; });
  auto& state = units_.at(unit);
  (backward ? state.backward_list : state.forward_list) = std::move(units);
}

std::optional<UnitId> Schedule::expected_successor() const {
  if (const auto* known = successors_.after(*kind_, previous_, *current_)) return *known;
  if (kind_ == PassKind::kBackward) return std::nullopt;
  const auto next = units_.upper_bound(*current_);
  return next == units_.end() ? std::nullopt : std::optional(next->first);
}

void Schedule::choose_prefetch(Decision& decision) {
  const bool backward = kind_ == PassKind::kBackward;
  const auto& here = units_.at(*current_);
  const auto& list = backward ? here.backward_list : here.forward_list;
  for (const auto unit : list) {
    auto& state = units_.at(unit);
    if (state.turn != Turn::kNone) continue;
    state.listed = true;
    state.guess_age.reset();
    decision.prefetch.push_back(unit);
  }
  if (!list.empty()) return;
  const auto next = expected_successor();
  // The first unit again: a new round may begin, or not.
  if (!next || next == first_) return;
  auto& state = units_.at(*next);
  if (state.turn != Turn::kNone || (backward && !state.policy->prefetch_in_backward)) return;
  state.guess_age = 0;
  decision.prefetch.push_back(*next);
}

std::vector<UnitId> Schedule::take_put_off() {
  Decision decision;
  if (std::exchange(puts_off_, false) && current_) choose_prefetch(decision);
  return decision.prefetch;
}

void Schedule::age_guesses(UnitId entered, Decision& decision) {
  for (const auto id : resident_) {
    auto& age = units_.at(id).guess_age;
    if (id == entered || !age || ++*age <= kDepth) continue;
    age.reset();
    decision.discard.push_back(id);
  }
}

void Schedule::discard_listed(UnitId entered, Decision& decision) {
  for (auto& [id, state] : units_) {
    if (id == entered || !std::exchange(state.listed, false)) continue;
    if (state.turn != Turn::kNone) decision.discard.push_back(id);
  }
}

}  // namespace fsdp::internal
