#include "tests/fully_shard/random_programs/residency_model.h"

#include <utility>

namespace fsdp::testing {

void ResidencyModel::Rounds::end() {
  if (now > 0) last = now;
  now = 0;
}

int ResidencyModel::add_unit(Spec spec) {
  units_.push_back({.spec = std::move(spec)});
  return static_cast<int>(units_.size()) - 1;
}

void ResidencyModel::set_trainable(int unit, int param_id, bool trainable) {
  for (auto& each : at(unit).spec.params) {
    if (each.id == param_id) each.trainable = trainable;
  }
}

// --- Units and what is asked of them

int ResidencyModel::root_of(int unit) const {
  while (at(unit).spec.parent >= 0) unit = at(unit).spec.parent;
  return unit;
}

bool ResidencyModel::is_at_or_below(int unit, int ancestor) const {
  for (; unit >= 0; unit = at(unit).spec.parent) {
    if (unit == ancestor) return true;
  }
  return false;
}

bool ResidencyModel::are_related(int a, int b) const {
  return is_at_or_below(a, b) || is_at_or_below(b, a);
}

std::vector<int> ResidencyModel::units_of(int root) const {
  std::vector<int> units;
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (root_of(unit) == root) units.push_back(unit);
  }
  return units;
}

// Unset: true, and false for a root.
bool ResidencyModel::reshards_after_forward(int unit) const {
  const auto& spec = at(unit).spec;
  return spec.reshard_after_forward.value_or(spec.parent >= 0);
}

// By its own root's running kind of pass.
bool ResidencyModel::reshards_now(int unit) const {
  switch (at(root_of(unit)).kind) {
    case Kind::kNone:
      return false;
    case Kind::kBackward:
      return at(unit).spec.reshard_after_backward;
    default:
      return reshards_after_forward(unit);
  }
}

// An explicit true on a unit with units below, whose turn no unit of its tree would end.
bool ResidencyModel::reshards_though_ancestor(int unit) const {
  if (!at(unit).spec.reshard_after_forward.value_or(false)) return false;
  for (int below = 0; below < static_cast<int>(units_.size()); ++below) {
    if (below != unit && is_at_or_below(below, unit)) return true;
  }
  return false;
}

std::set<int> ResidencyModel::resident() const {
  std::set<int> units;
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (at(unit).presence == Presence::kResident) units.insert(unit);
  }
  return units;
}

ResidencyModel::Count ResidencyModel::needed_gathers() const {
  Count count;
  for (const auto& unit : units_) count.add(unit.gathers);
  return count;
}

ResidencyModel::Count ResidencyModel::reductions() const {
  Count count;
  for (const auto& unit : units_) count.add(unit.reductions);
  return count;
}

// --- Turns

void ResidencyModel::touched(int unit, Touch touch) {
  const auto root = root_of(unit);
  const auto kind = touch == Touch::kTraining    ? Kind::kTraining
                    : touch == Touch::kInference ? Kind::kInference
                                                 : Kind::kBackward;
  const bool records = touch == Touch::kTraining || touch == Touch::kRecompute;
  if (at(root).kind != kind) change_kind(root, kind, unit);
  end_turns(unit);
  if (at(root).current != unit) become_current(root, unit);

  auto& touched = at(unit);
  if (touched.dirty && records) empty(unit);  // written back, and gathered again
  if (touched.presence == Presence::kAbsent) touched.gathers.add({1, 1});
  touched.presence = Presence::kResident;
  touched.turn = touch == Touch::kRecompute ? Turn::kWaiting : Turn::kInTurn;
  if (records) touched.debt = Debt::kOwes;
  if (kind == Kind::kBackward) touched.touched_in_backward = true;
}

void ResidencyModel::change_kind(int root, Kind kind, int touched) {
  const auto before = at(root).kind;
  const auto last = at(root).current;
  for (const int unit : units_of(root)) {
    auto& each = at(unit);
    const bool had_turn = each.presence == Presence::kResident && each.turn != Turn::kWaiting;
    const bool left_by_inference = before == Kind::kInference && reshards_after_forward(unit);
    const bool done = before != Kind::kBackward && unit != last && reshards_though_ancestor(unit);
    if (unit != touched && had_turn && (left_by_inference || done)) empty(unit);
    each.turn = Turn::kWaiting;
  }
  if (before == Kind::kInference) end_rounds(root, before);
  at(root).kind = kind;
  at(root).current = -1;
  at(root).first = touched;
}

void ResidencyModel::become_current(int root, int unit) {
  const bool again = at(root).current >= 0;
  const auto kind = at(root).kind;
  if (kind == Kind::kInference && again && unit == at(root).first) end_rounds(root, kind);
  ++at(unit).rounds[static_cast<size_t>(kind)].now;
  at(root).current = unit;
}

void ResidencyModel::end_turns(int touched) {
  const auto root = root_of(touched);
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    auto& each = at(unit);
    if (unit == touched || each.presence != Presence::kResident) continue;
    const bool same_root = root_of(unit) == root;
    const bool ends = same_root ? !are_related(unit, touched) : each.spec.parent < 0;
    if (each.turn == Turn::kInTurn && ends) each.turn = Turn::kOver;
    const auto kind = at(root).kind;
    const auto& rounds = each.rounds[static_cast<size_t>(kind)];
    const bool as_often_as_last_time = same_root && kind != Kind::kBackward &&
                                       each.turn != Turn::kWaiting && rounds.last > 0 &&
                                       rounds.now >= rounds.last;
    if (each.turn == Turn::kOver && reshards_now(unit)) {
      empty(unit);
    } else if (as_often_as_last_time && reshards_though_ancestor(unit)) {
      empty(unit);
    }
  }
}

void ResidencyModel::end_rounds(int root, Kind kind) {
  for (const int unit : units_of(root)) at(unit).rounds[static_cast<size_t>(kind)].end();
}

// What was written to it goes to the shard first. A gather that was asked for by hand and
// is dropped may be counted as an unused one.
void ResidencyModel::empty(int unit) {
  auto& emptied = at(unit);
  if (emptied.presence == Presence::kGathering) --emptied.gathers.least;
  emptied.presence = Presence::kAbsent;
  emptied.turn = Turn::kWaiting;
  emptied.dirty = false;
}

// --- By hand, and writes

void ResidencyModel::unshard_issued(int unit) {
  auto& asked = at(unit);
  asked.turn = Turn::kWaiting;
  if (asked.presence != Presence::kAbsent) return;
  asked.presence = Presence::kGathering;
  asked.gathers.add({1, 1});
}

void ResidencyModel::unsharded_explicitly(int unit) {
  unshard_issued(unit);
  at(unit).presence = Presence::kResident;
}

void ResidencyModel::resharded_explicitly(int unit) {
  if (at(unit).presence == Presence::kResident) empty(unit);
}

void ResidencyModel::entry_written(int unit) { empty(unit); }

}  // namespace fsdp::testing
