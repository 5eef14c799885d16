// What a message of reductions that need no order (unordered_reductions.h) is about, and
// its number in the channel of its process group. Pure.
#pragma once

#include "device_mesh/peer_memory/number_range.h"

#include <compare>
#include <cstdint>

namespace fsdp::internal {

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

}  // namespace fsdp::internal
