#include "fully_shard/schedule/schedule.h"

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

size_t index(PassKind kind) { return static_cast<size_t>(kind); }

}  // namespace

void Schedule::Visits::end_round() {
  if (now > 0) before = now;
  now = 0;
}

void Schedule::add(UnitId unit, const UnitPolicy& policy) { units_.emplace(unit, State{&policy}); }

void Schedule::set_parent(UnitId unit, UnitId parent) { units_.at(unit).parent = parent; }

void Schedule::remove(UnitId unit) {
  units_.erase(unit);
  resident_.erase(unit);
  successors_.remove(unit);
  for (auto& [id, state] : units_) {
    if (state.parent == unit) state.parent.reset();
    std::erase(state.forward_list, unit);
    std::erase(state.backward_list, unit);
  }
  if (current_ == unit) current_.reset();
  if (previous_ == unit) previous_.reset();
  if (first_ == unit) first_.reset();
}

void Schedule::absorb(Schedule&& other) {
  units_.merge(other.units_);
  resident_.merge(other.resident_);
  successors_.absorb(std::move(other.successors_));
}

bool Schedule::is_ancestor(UnitId ancestor, UnitId unit) const {
  for (auto above = units_.at(unit).parent; above; above = units_.at(*above).parent) {
    if (*above == ancestor) return true;
  }
  return false;
}

bool Schedule::has_descendants(UnitId unit) const {
  return std::any_of(units_.begin(), units_.end(),
                     [unit](const auto& item) { return item.second.parent == unit; });
}

bool Schedule::is_related(UnitId a, UnitId b) const {
  return is_ancestor(a, b) || is_ancestor(b, a);
}

// By the policy of the running kind of pass.
bool Schedule::reshards(const State& state) const {
  if (kind_ == PassKind::kBackward) return state.policy->reshard_after_backward;
  return state.policy->reshard_after_forward.value_or(state.parent.has_value());
}

bool Schedule::is_current(UnitId unit, Pass pass) const {
  if (current_ != unit || kind_ != kind_of(pass)) return false;
  return units_.at(unit).turn == (pass == Pass::kRecompute ? Turn::kOpen : Turn::kInTurn);
}

Decision Schedule::touched(UnitId unit, Pass pass) {
  Decision decision;
  if (kind_ != kind_of(pass)) change_kind(kind_of(pass), unit, decision);
  if (current_ != unit) enter(unit, decision);
  set_turn(unit, pass == Pass::kRecompute ? Turn::kOpen : Turn::kInTurn);
  return decision;
}

// What is expected of it came, or was set aside.
void Schedule::set_turn(UnitId unit, Turn turn) {
  auto& state = units_.at(unit);
  state.turn = turn;
  state.guess_age.reset();
  state.listed = false;
  resident_.insert(unit);
}

void Schedule::change_kind(PassKind kind, UnitId entered, Decision& decision) {
  for (auto& [id, state] : units_) {
    if (id == entered || state.turn == Turn::kNone || state.turn == Turn::kWaiting) continue;
    // Kept for a backward that never came: there is none without gradients.
    const bool left_by_inference = kind_ == PassKind::kInference && reshards(state);
    // An ancestor that was to go in the middle of its forward, and whose place there was
    // not known.
    const bool left_by_training = kind_ == PassKind::kTraining && id != current_ &&
                                  state.policy->reshard_after_forward == true &&
                                  has_descendants(id);
    if (left_by_inference || left_by_training) decision.evict.push_back(id);
  }
  discard_listed(entered, decision);
  for (auto& [id, state] : units_) {
    if (state.turn != Turn::kNone) state.turn = Turn::kWaiting;
    if (kind == PassKind::kInference) state.visits[index(kind)].end_round();
  }
  end_pass();
  kind_ = kind;
}

void Schedule::enter(UnitId unit, Decision& decision) {
  if (current_) {
    learn(unit);
  } else {
    first_ = unit;
  }
  previous_ = std::exchange(current_, unit);
  end_turns(unit, decision);
  age_guesses(unit, decision);
  count_visit(unit);
  puts_off_ = kind_ == PassKind::kBackward && units_.at(unit).policy->prefetch_after_gradients;
  if (!puts_off_) choose_prefetch(decision);
}

void Schedule::end_turns(UnitId entered, Decision& decision) {
  for (const auto id : resident_) {
    if (id == entered) continue;
    auto& state = units_.at(id);
    if (state.turn == Turn::kInTurn) {
      const auto& visits = state.visits[index(*kind_)];
      const bool was_last_visit =
          kind_ != PassKind::kBackward && state.policy->reshard_after_forward == true &&
          has_descendants(id) && visits.before && visits.now >= *visits.before;
      if (was_last_visit || !is_related(id, entered)) state.turn = Turn::kOver;
    }
    if (state.turn == Turn::kOver && reshards(state)) decision.evict.push_back(id);
  }
}

void Schedule::count_visit(UnitId unit) {
  if (kind_ == PassKind::kInference && unit == first_) {
    for (auto& [id, state] : units_) state.visits[index(*kind_)].end_round();
  }
  ++units_.at(unit).visits[index(*kind_)].now;
}

Decision Schedule::touched_elsewhere() {
  Decision decision;
  if (!kind_) return decision;
  for (auto& [id, state] : units_) {
    if (state.parent) continue;
    if (state.turn == Turn::kInTurn) state.turn = Turn::kOver;
    if (state.turn == Turn::kOver && reshards(state)) decision.evict.push_back(id);
  }
  return decision;
}

Decision Schedule::backward_ended(bool is_last) {
  Decision decision;
  for (auto& [id, state] : units_) {
    const bool ahead = state.listed || state.guess_age;
    state.listed = false;
    state.guess_age.reset();
    state.visits[index(PassKind::kTraining)].end_round();
    if (state.turn == Turn::kNone) continue;
    if (ahead) {
      decision.discard.push_back(id);
    } else if (is_last && state.policy->reshard_after_backward) {
      decision.evict.push_back(id);
    } else {
      state.turn = Turn::kWaiting;
    }
  }
  end_pass();
  kind_.reset();
  return decision;
}

void Schedule::unsharded(UnitId unit) {
  if (resident_.insert(unit).second) units_.at(unit).turn = Turn::kWaiting;
}

void Schedule::unsharded_by_hand(UnitId unit) { set_turn(unit, Turn::kWaiting); }

void Schedule::emptied(UnitId unit) {
  set_turn(unit, Turn::kNone);
  resident_.erase(unit);
}

void Schedule::learn(std::optional<UnitId> next) {
  const auto before = successors_.learn(*kind_, previous_, *current_, next);
  if (kind_ != PassKind::kTraining || order_change_ || !before || !*before || !next) return;
  if (*before != first_ && next != first_) order_change_ = OrderChange{*current_, **before, *next};
}

void Schedule::end_pass() {
  if (kind_ && current_) learn(std::nullopt);
  current_ = previous_ = first_ = std::nullopt;
}

void Schedule::forget() {
  successors_.forget();
  order_change_.reset();
  for (auto& [id, state] : units_) state.visits = {};
  current_ = previous_ = first_ = std::nullopt;
}

}  // namespace fsdp::internal
