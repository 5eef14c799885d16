#include "tests/fully_shard/random_programs/repeated_step.h"

#include <map>
#include <utility>

namespace fsdp::testing {
namespace {

std::string kind_of_turn(const UnitTurn& turn) { return turn.what.substr(0, turn.what.find(' ')); }

// What became of the gather for `next`, which follows `turn`; nothing: what was to. A
// unit that goes when `turn` begins is not gathered ahead at that moment.
std::optional<std::string> wrong_prefetch_between(const UnitTurn& turn, const UnitTurn& next,
                                                  const PrefetchRule& rule) {
  const bool ahead = !rule.never.contains(next.unit);
  const bool at_once = turn.on_the_way.contains(next.unit);
  if (at_once && (!ahead || rule.after_gradients)) return "was issued too early";
  const bool goes = turn.resident_before.contains(next.unit);
  if (ahead && !rule.after_gradients && !at_once && !goes) return "was not issued ahead";
  const auto& later = turn.on_the_way_after_gradients;
  if (ahead && rule.after_gradients && later && !later->contains(next.unit))
    return "was not issued when the gradients had left";
  return std::nullopt;
}

// Whether each turn follows from the two before it.
bool has_one_successor_each(const std::vector<UnitTurn>& turns) {
  std::map<std::pair<std::string, std::string>, std::string> successors;
  for (size_t i = 1; i <= turns.size(); ++i) {
    const auto& turn = turns[i - 1];
    // Where the kind changes, what came before is not looked at.
    const bool has_previous = i > 1 && kind_of_turn(turns[i - 2]) == kind_of_turn(turn);
    const auto previous = has_previous ? turns[i - 2].what : std::string();
    const bool ends = i == turns.size() || kind_of_turn(turns[i]) != kind_of_turn(turn);
    const auto next = ends ? "end" : turns[i].what;
    const auto [known, added] = successors.emplace(std::pair(previous, turn.what), next);
    if (!added && known->second != next) return false;
  }
  return true;
}

}  // namespace

// The first unit of a pass is never guessed.
std::optional<std::string> wrong_prefetch(const std::vector<UnitTurn>& turns,
                                          const PrefetchRule& rule) {
  int first = -1;
  for (size_t i = 0; i < turns.size(); ++i) {
    const auto& turn = turns[i];
    if (!turn.in_backward) continue;
    if (i == 0 || !turns[i - 1].in_backward) {
      first = turn.unit;
    } else if (turn.needs_gather() && turn.unit != first) {
      const auto wrong = wrong_prefetch_between(turns[i - 1], turn, rule);
      if (wrong) return "the gather for '" + turn.what + "' " + *wrong;
    }
  }
  return std::nullopt;
}

std::optional<std::string> repeat_step(const std::function<void()>& step, ResidencyOracle& oracle,
                                       const PrefetchRule& rule) {
  std::vector<UnitTurn> before, turns;
  int64_t unused = 0;
  for (int i = 0; i < 3; ++i) {
    unused = oracle.unused_prefetches();
    oracle.take_turns();
    step();
    before = std::exchange(turns, oracle.take_turns());
  }
  if (before != turns || !has_one_successor_each(turns)) return std::nullopt;
  auto wrong = wrong_prefetch(turns, rule);
  if (oracle.unused_prefetches() != unused) wrong = "something was gathered in vain";
  if (!wrong) return std::nullopt;
  auto text = "in a step that repeats " + *wrong + "; its turns are";
  for (const auto& turn : turns) text += "\n  " + turn.what;
  return text;
}

}  // namespace fsdp::testing
