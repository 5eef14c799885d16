// What the ranks of a mesh dimension say, at the beginning of a backward, that they will
// reduce in it, where each rank reduces the units that it uses in an order of its own
// (unordered_reductions.h). Pure.
//
//   BackwardPlans plans(2);
//   plans.add(0, {.root = 7, .units = {3, 1}});      // rank 0 will send unit 3, then unit 1
//   plans.sends(0, 7, 2) == Sends::kNo;
//   plans.sends(1, 7, 2) == Sends::kUnknown;         // its plan has not come
#pragma once

#include "device_mesh/peer_memory/number_range.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace fsdp::internal {

// What a message of reductions that need no order (unordered_reductions.h) is about, and
// its number in the channel of its process group. Pure.
struct ReductionNumber {
  enum class Kind : uint32_t {
    kPlan,    // what a backward will reduce; `unit` counts the plans of a backward
    kEnd,     // a backward has sent all
    kFailed,  // a backward has thrown
    kRows,    // gradients
  };

  uint32_t step = 0;      // of the process group: from one last backward to the next
  uint32_t backward = 0;  // of the step
  Kind kind = Kind::kRows;
  uint32_t unit = 0;
  uint32_t round = 0;  // 0: as planned; 1, 2, ...: further gradients of the unit
  uint32_t part = 0;   // a dtype of the unit

  auto operator<=>(const ReductionNumber&) const = default;

  static constexpr uint32_t kSteps = 1 << 18;  // then they begin anew
  static constexpr uint32_t kBackwards = 1 << 18, kUnits = 1 << 16, kRounds = 4, kParts = 16;

  bool is_possible() const {
    return backward < kBackwards && unit < kUnits && round < kRounds && part < kParts;
  }
  // Other messages of the channel have numbers below these, or above. REQUIRES:
  // is_possible().
  uint64_t in_channel() const {
    uint64_t number = kMessages + step % kSteps;
    number = number << 2 | static_cast<uint64_t>(kind);
    number = number << 18 | backward;
    number = number << 16 | unit;
    number = number << 2 | round;
    return number << 4 | part;
  }
  static ReductionNumber of(uint64_t in_channel) {
    const auto take = [&in_channel](uint32_t bits) {
      const auto value = static_cast<uint32_t>(in_channel & ((uint64_t{1} << bits) - 1));
      in_channel >>= bits;
      return value;
    };
    ReductionNumber number;
    number.part = take(4);
    number.round = take(2);
    number.unit = take(16);
    number.backward = take(18);
    number.kind = static_cast<Kind>(take(2));
    number.step = take(18);
    return number;
  }
  // All of a step; all of steps before it; those of gradients, and all others.
  static NumberRange all_of(uint32_t step) { return between(step, Kind::kPlan, Kind::kRows); }
  static NumberRange all_before(uint32_t step) { return {all_of(0).first, all_of(step).first - 1}; }
  static NumberRange rows_of(uint32_t step) { return between(step, Kind::kRows, Kind::kRows); }
  static NumberRange words_of(uint32_t step) { return between(step, Kind::kPlan, Kind::kFailed); }

 private:
  static constexpr uint64_t kMessages = uint64_t{1} << 19;  // above the bits of steps

  static NumberRange between(uint32_t step, Kind first, Kind last) {
    return {ReductionNumber{.step = step, .kind = first}.in_channel(),
            ReductionNumber{.step = step,
                            .backward = kBackwards - 1,
                            .kind = last,
                            .unit = kUnits - 1,
                            .round = kRounds - 1,
                            .part = kParts - 1}
                .in_channel()};
  }
};

using UnitNumbers = std::vector<uint32_t>;

// An order of all units of `orders`, each of which has a unit once at most, that none of
// these contradicts; none where they contradict one another. The same for the same
// `orders`: of the units that may come next, the first one of the first order that has
// one (Kahn, "Topological sorting of large networks", 1962).
inline std::optional<UnitNumbers> common_order(const std::vector<UnitNumbers>& orders) {
  const bool are_alike = std::all_of(orders.begin(), orders.end(),
                                     [&](const auto& each) { return each == orders.front(); });
  if (are_alike) return orders.empty() ? UnitNumbers{} : orders.front();
  std::map<uint32_t, std::set<uint32_t>> before;  // units that come before each
  for (const auto& order : orders) {
    for (size_t i = 0; i < order.size(); ++i) {
      auto& those = before[order[i]];
      if (i > 0) those.insert(order[i - 1]);
    }
  }
  std::set<uint32_t> placed;
  const auto may_be_next = [&](uint32_t unit) {
    const auto& those = before.at(unit);
    return !placed.contains(unit) && std::all_of(those.begin(), those.end(), [&](uint32_t each) {
      return placed.contains(each);
    });
  };
  UnitNumbers result;
  while (result.size() < before.size()) {
    const uint32_t* next = nullptr;
    for (const auto& order : orders) {
      const auto found = std::find_if(order.begin(), order.end(), may_be_next);
      if (found == order.end()) continue;
      next = &*found;
      break;
    }
    if (next == nullptr) return std::nullopt;
    result.push_back(*next);
    placed.insert(*next);
  }
  return result;
}

// Of one backward.
class BackwardPlans {
 public:
  // The units of one root that a rank will reduce, in that order. A rank adds a plan for
  // each root when its backward meets that root.
  struct Plan {
    uint32_t root = 0;  // the same on all ranks
    UnitNumbers units = {};
  };
  enum class Sends { kYes, kNo, kUnknown };

  explicit BackwardPlans(int64_t ranks) : of_ranks_(static_cast<size_t>(ranks)) {}

  void add(int64_t rank, Plan plan) {
    of_ranks_[static_cast<size_t>(rank)].push_back(std::move(plan));
  }
  // Whether that rank sends gradients of `unit`, of that root.
  Sends sends(int64_t rank, uint32_t root, uint32_t unit) const {
    const auto* const plan = find(rank, root);
    if (plan == nullptr) return Sends::kUnknown;
    const bool has = std::find(plan->units.begin(), plan->units.end(), unit) != plan->units.end();
    return has ? Sends::kYes : Sends::kNo;
  }
  // Whether ranks that wait for the rows of one reduction before they send those of the
  // next can not wait for one another: as far as they have told, they come to the same
  // roots one after the other, and their orders do not contradict one another.
  bool have_one_order() const {
    const auto& longest =
        *std::max_element(of_ranks_.begin(), of_ranks_.end(),
                          [](const auto& a, const auto& b) { return a.size() < b.size(); });
    for (const auto& plans : of_ranks_) {
      const bool is_alike =
          std::equal(plans.begin(), plans.end(), longest.begin(),
                     [](const Plan& a, const Plan& b) { return a.root == b.root; });
      if (!is_alike) return false;
    }
    return common_order(orders()).has_value();
  }
  // One order of all units that some rank planned, the same on all ranks that know all
  // plans: common_order(), or where there is none that of their numbers.
  UnitNumbers order() const {
    if (auto order = common_order(orders())) return *order;
    std::set<uint32_t> units;
    for (const auto& order : orders()) units.insert(order.begin(), order.end());
    return {units.begin(), units.end()};
  }

 private:
  const Plan* find(int64_t rank, uint32_t root) const {
    for (const auto& plan : of_ranks_[static_cast<size_t>(rank)]) {
      if (plan.root == root) return &plan;
    }
    return nullptr;
  }
  // By rank; a unit that belongs to two plans of a rank counts in the first.
  std::vector<UnitNumbers> orders() const {
    std::vector<UnitNumbers> orders;
    for (const auto& plans : of_ranks_) {
      auto& order = orders.emplace_back();
      for (const auto& plan : plans) {
        for (const auto unit : plan.units) {
          if (std::find(order.begin(), order.end(), unit) == order.end()) order.push_back(unit);
        }
      }
    }
    return orders;
  }

  std::vector<std::vector<Plan>> of_ranks_;
};

}  // namespace fsdp::internal
