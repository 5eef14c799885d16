// What the end of a backward reduces and empties, by the rules.
#include "tests/fully_shard/random_programs/residency_model.h"

#include <algorithm>
#include <set>

namespace fsdp::testing {

bool ResidencyModel::takes_part(int root) const {
  for (const int unit : units_of(root)) {
    if (at(unit).touched_in_backward || at(unit).has_gradient) return true;
  }
  return false;
}

ResidencyModel::Count ResidencyModel::dtypes_to_reduce(int unit) const {
  std::set<int> certain, possible;
  for (const auto& param : at(unit).spec.params) {
    if (param.trainable || param.unsynchronized) certain.insert(param.dtype);
    if (param.trainable || param.unsynchronized || param.summed) possible.insert(param.dtype);
  }
  return {static_cast<int64_t>(certain.size()), static_cast<int64_t>(possible.size())};
}

bool ResidencyModel::keeps_unsynchronized(int unit) const {
  const auto& params = at(unit).spec.params;
  return std::any_of(params.begin(), params.end(),
                     [](const Param& param) { return param.unsynchronized; });
}

void ResidencyModel::forget_kept(int unit) {
  for (auto& param : at(unit).spec.params) param.unsynchronized = param.summed = false;
}

// Of the parameters that some rank had gradients of, which is not told here.
void ResidencyModel::keep_sums(int unit) {
  for (auto& param : at(unit).spec.params) {
    param.summed |= param.trainable || param.unsynchronized;
    param.unsynchronized = false;
  }
  at(unit).debt = Debt::kPossible;
}

void ResidencyModel::reduce(int unit) {
  auto& each = at(unit);
  const bool certain = each.debt == Debt::kOwes || each.touched_in_backward;
  if (!certain && each.debt == Debt::kNone && !each.has_gradient) return;
  if (!each.synchronizes) {
    if (!each.touched_in_backward && !each.has_gradient) return;  // owes what it owed
    for (auto& param : each.spec.params) param.unsynchronized |= param.trainable;
    each.debt = Debt::kOwes;
    return;
  }
  const auto count = dtypes_to_reduce(unit);
  each.reductions.add({certain ? count.least : 0, count.most});
  // What owes and is all frozen may go on owing.
  each.debt = count.most == 0 && each.debt != Debt::kNone ? Debt::kPossible : Debt::kNone;
  if (each.keeps_sums) return keep_sums(unit);
  forget_kept(unit);
}

void ResidencyModel::pending_gradients_dropped(int unit) {
  auto& dropped = at(unit);
  forget_kept(unit);
  if (dropped.debt == Debt::kOwes) dropped.debt = Debt::kPossible;
}

void ResidencyModel::backward_ended() {
  for (int root = 0; root < static_cast<int>(units_.size()); ++root) {
    if (at(root).spec.parent >= 0 || !takes_part(root)) continue;
    for (const int unit : units_of(root)) {
      reduce(unit);
      auto& each = at(unit);
      if (each.presence != Presence::kAbsent && each.spec.reshard_after_backward) empty(unit);
      each.turn = Turn::kWaiting;
      each.touched_in_backward = each.has_gradient = false;
    }
    for (const auto kind : {Kind::kTraining, Kind::kInference}) end_rounds(root, kind);
    at(root).kind = Kind::kNone;
    at(root).current = -1;
  }
}

void ResidencyModel::backward_aborted() {
  for (int root = 0; root < static_cast<int>(units_.size()); ++root) {
    if (at(root).spec.parent >= 0 || !takes_part(root)) continue;
    for (const int unit : units_of(root)) {
      auto& each = at(unit);
      if (each.presence != Presence::kAbsent) empty(unit);
      // How many left before depends on what had arrived on this rank.
      if (each.synchronizes) each.reductions.most += dtypes_to_reduce(unit).most;
      if (each.touched_in_backward || each.has_gradient) forget_kept(unit);
      if (each.debt == Debt::kOwes && !keeps_unsynchronized(unit)) each.debt = Debt::kPossible;
      each.touched_in_backward = each.has_gradient = false;
    }
    for (const auto kind : {Kind::kTraining, Kind::kInference}) end_rounds(root, kind);
    at(root).kind = Kind::kNone;
    at(root).current = -1;
  }
}

}  // namespace fsdp::testing
