#include "fully_shard/schedule/schedule.h"

#include <utility>

namespace fsdp::internal {
namespace {

size_t index(PassKind kind) { return static_cast<size_t>(kind); }

}  // namespace

void Schedule::Visits::end_round() {
  if (now > 0) before = now;
  now = 0;
}

void Schedule::add(UnitId unit, const UnitPolicy& policy) {
  units_.emplace(unit, State{&policy});
  prefetch_policy_.add(unit, policy);
}

void Schedule::remove(UnitId unit) {
  units_.erase(unit);
  unsharded_.erase(unit);
  tree_.remove(unit);
  prefetch_policy_.remove(unit);
  at_.remove(unit);
}

void Schedule::absorb(Schedule&& other) {
  units_.merge(other.units_);
  unsharded_.merge(other.unsharded_);
  tree_.absorb(std::move(other.tree_));
  prefetch_policy_.absorb(std::move(other.prefetch_policy_));
}

// By the policy for the running kind of pass.
bool Schedule::reshards(UnitId unit, const UnitPolicy& policy) const {
  if (at_.kind == PassKind::kBackward) return policy.reshard_after_backward;
  const auto& asked = policy.reshard_after_forward;
  return asked ? *asked : !tree_.is_root(unit);
}

bool Schedule::is_current(UnitId unit, Pass pass) const {
  if (at_.current != unit || at_.kind != kind_of(pass)) return false;
  return units_.at(unit).turn == (pass == Pass::kRecompute ? Turn::kOpen : Turn::kInTurn);
}

Decision Schedule::touched(UnitId unit, Pass pass) {
  Decision decision;
  if (at_.kind != kind_of(pass)) change_kind(kind_of(pass), unit, decision);
  if (at_.current != unit) enter(unit, decision);
  set_turn(unit, pass == Pass::kRecompute ? Turn::kOpen : Turn::kInTurn);
  return decision;
}

void Schedule::set_turn(UnitId unit, Turn turn) {
  units_.at(unit).turn = turn;
  prefetch_policy_.clear_ahead(unit);
  unsharded_.insert(unit);
}

void Schedule::change_kind(PassKind kind, UnitId entered, Decision& decision) {
  for (const auto id : unsharded_) {
    auto& state = units_.at(id);
    const auto turn = std::exchange(state.turn, Turn::kWaiting);
    if (id == entered || turn == Turn::kWaiting) continue;
    // Kept for a backward that never came: there is none without gradients.
    const bool left_by_inference = at_.kind == PassKind::kInference && reshards(id, *state.policy);
    // A unit with children that asked to be resharded in forward, but whose last use
    // there could not be predicted.
    const bool left_by_training = at_.kind == PassKind::kTraining && id != at_.current &&
                                  state.policy->reshard_after_forward == true &&
                                  tree_.has_descendants(id);
    if (left_by_inference || left_by_training) decision.reshard.push_back(id);
  }
  prefetch_policy_.drop_listed(entered, unsharded_, decision.drop);
  if (kind == PassKind::kInference) {
    for (auto& [id, state] : units_) state.visits[index(kind)].end_round();
  }
  end_pass();
  at_.kind = kind;
}

void Schedule::enter(UnitId unit, Decision& decision) {
  if (at_.current) prefetch_policy_.learn(at_, unit);
  at_.enter(unit);
  end_turns(unit, decision);
  prefetch_policy_.age_guesses(unit, unsharded_, decision.drop);
  count_visit(unit);
  decision.prefetch = prefetch_policy_.entered(at_, unsharded_);
}

void Schedule::end_turns(UnitId entered, Decision& decision) {
  for (const auto id : unsharded_) {
    if (id == entered) continue;
    auto& state = units_.at(id);
    if (state.turn == Turn::kInTurn) {
      const auto& visits = state.visits[index(*at_.kind)];
      const bool was_last_visit =
          at_.kind != PassKind::kBackward && state.policy->reshard_after_forward == true &&
          tree_.has_descendants(id) && visits.before && visits.now >= *visits.before;
      if (was_last_visit || !tree_.is_related(id, entered)) state.turn = Turn::kOver;
    }
    if (state.turn == Turn::kOver && reshards(id, *state.policy)) decision.reshard.push_back(id);
  }
}

void Schedule::count_visit(UnitId unit) {
  if (at_.kind == PassKind::kInference && unit == at_.first) {
    for (auto& [id, state] : units_) state.visits[index(*at_.kind)].end_round();
  }
  ++units_.at(unit).visits[index(*at_.kind)].now;
}

Decision Schedule::touched_elsewhere() {
  Decision decision;
  if (!at_.kind) return decision;
  for (const auto id : unsharded_) {
    if (!tree_.is_root(id)) continue;
    auto& state = units_.at(id);
    if (state.turn == Turn::kInTurn) state.turn = Turn::kOver;
    if (state.turn == Turn::kOver && reshards(id, *state.policy)) decision.reshard.push_back(id);
  }
  return decision;
}

Decision Schedule::backward_ended(bool is_last) {
  Decision decision;
  for (const auto id : unsharded_) {
    auto& state = units_.at(id);
    if (prefetch_policy_.is_ahead(id)) {
      decision.drop.push_back(id);
    } else if (is_last && state.policy->reshard_after_backward) {
      decision.reshard.push_back(id);
    } else {
      state.turn = Turn::kWaiting;
    }
  }
  prefetch_policy_.clear_all_ahead();
  for (auto& [id, state] : units_) state.visits[index(PassKind::kTraining)].end_round();
  end_pass();
  at_.kind.reset();
  return decision;
}

void Schedule::unsharded(UnitId unit) {
  if (unsharded_.insert(unit).second) units_.at(unit).turn = Turn::kWaiting;
}

void Schedule::unsharded_explicitly(UnitId unit) { set_turn(unit, Turn::kWaiting); }

void Schedule::emptied(UnitId unit) {
  set_turn(unit, Turn::kNone);
  unsharded_.erase(unit);
}

void Schedule::end_pass() {
  if (at_.kind && at_.current) prefetch_policy_.learn(at_, std::nullopt);
  at_.leave_units();
}

void Schedule::forget() {
  prefetch_policy_.forget();
  for (auto& [id, state] : units_) state.visits = {};
  at_.leave_units();
}

}  // namespace fsdp::internal
