#include "fully_shard/schedule/prefetch_policy.h"

#include <utility>

namespace fsdp::internal {
namespace {

// How many units are gathered ahead of the one that is entered.
constexpr int64_t kDepth = 1;

}  // namespace

void PrefetchPolicy::remove(UnitId unit) {
  units_.erase(unit);
  clear_ahead(unit);
  successors_.remove(unit);
  for (auto& [id, state] : units_) {
    std::erase(state.forward_list, unit);
    std::erase(state.backward_list, unit);
  }
}

void PrefetchPolicy::absorb(PrefetchPolicy&& other) {
  units_.merge(other.units_);
  listed_.merge(other.listed_);
  guesses_.merge(other.guesses_);
  successors_.absorb(std::move(other.successors_));
}

void PrefetchPolicy::set_list(UnitId unit, bool backward, std::vector<UnitId> units) {
  std::erase_if(units, [&](UnitId other) { return !units_.contains(other) || other == unit; });
  auto& state = units_.at(unit);
  (backward ? state.backward_list : state.forward_list) = std::move(units);
}

void PrefetchPolicy::learn(const PassPosition& at, std::optional<UnitId> next) {
  const auto before = successors_.learn(*at.kind, at.previous, *at.current, next);
  if (at.kind != PassKind::kTraining || order_change_ || !before || !*before || !next) return;
  if (*before == at.first || next == at.first) return;
  order_change_ = OrderChange{*at.current, **before, *next};
}

void PrefetchPolicy::forget() {
  successors_.forget();
  order_change_.reset();
}

std::optional<UnitId> PrefetchPolicy::expected_successor(const PassPosition& at) const {
  if (const auto* known = successors_.after(*at.kind, at.previous, *at.current)) return *known;
  if (at.kind == PassKind::kBackward) return std::nullopt;
  const auto next = units_.upper_bound(*at.current);
  return next == units_.end() ? std::nullopt : std::optional(next->first);
}

std::vector<UnitId> PrefetchPolicy::choose(const PassPosition& at,
                                           const std::set<UnitId>& unsharded) {
  std::vector<UnitId> prefetch;
  const bool backward = at.kind == PassKind::kBackward;
  const auto& here = units_.at(*at.current);
  const auto& list = backward ? here.backward_list : here.forward_list;
  for (const auto unit : list) {
    if (unsharded.contains(unit)) continue;
    listed_.insert(unit);
    guesses_.erase(unit);
    prefetch.push_back(unit);
  }
  if (!list.empty()) return prefetch;
  const auto next = expected_successor(at);
  // The first unit again: a new round may begin, or not.
  if (!next || next == at.first || unsharded.contains(*next)) return prefetch;
  if (backward && !units_.at(*next).policy->prefetch_in_backward) return prefetch;
  guesses_[*next] = 0;
  prefetch.push_back(*next);
  return prefetch;
}

std::vector<UnitId> PrefetchPolicy::entered(const PassPosition& at,
                                            const std::set<UnitId>& unsharded) {
  puts_off_ =
      at.kind == PassKind::kBackward && units_.at(*at.current).policy->prefetch_after_gradients;
  if (puts_off_) return {};
  return choose(at, unsharded);
}

std::vector<UnitId> PrefetchPolicy::take_put_off(const PassPosition& at,
                                                 const std::set<UnitId>& unsharded) {
  if (!std::exchange(puts_off_, false) || !at.current) return {};
  return choose(at, unsharded);
}

void PrefetchPolicy::clear_ahead(UnitId unit) {
  listed_.erase(unit);
  guesses_.erase(unit);
}

void PrefetchPolicy::clear_all_ahead() {
  listed_.clear();
  guesses_.clear();
}

void PrefetchPolicy::age_guesses(UnitId entered, const std::set<UnitId>& unsharded,
                                 std::vector<UnitId>& drop) {
  for (auto guess = guesses_.begin(); guess != guesses_.end();) {
    auto& [unit, age] = *guess;
    if (unit == entered || !unsharded.contains(unit) || ++age <= kDepth) {
      ++guess;
    } else {
      drop.push_back(unit);
      guess = guesses_.erase(guess);
    }
  }
}

void PrefetchPolicy::drop_listed(UnitId entered, const std::set<UnitId>& unsharded,
                                 std::vector<UnitId>& drop) {
  for (const auto unit : listed_) {
    if (unit != entered && unsharded.contains(unit)) drop.push_back(unit);
  }
  listed_.clear();
}

}  // namespace fsdp::internal
