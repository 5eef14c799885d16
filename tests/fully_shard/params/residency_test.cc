// Residency against its table: every sequence of up to six events from every start.
#include "fully_shard/params/residency.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <vector>

namespace fsdp::internal {
namespace {

enum class Event { kIssued, kFilled, kDropped, kEmptied, kHold, kRelease };
constexpr int kEvents = 6;

// The table of the header, by itself.
struct ModelOfResidency {
  Residence state;
  int holds = 0;

  std::optional<ModelOfResidency> after(Event event) const {
    const bool there = state == Residence::kResident || state == Residence::kBorrowed;
    switch (event) {
      case Event::kIssued:
        return state == Residence::kSharded ? step(Residence::kGathering, 0) : std::nullopt;
      case Event::kFilled:
        return state == Residence::kGathering ? step(Residence::kResident, 0) : std::nullopt;
      case Event::kDropped:
        return state == Residence::kGathering ? step(Residence::kSharded, 0) : std::nullopt;
      case Event::kEmptied:
        return state == Residence::kResident && holds == 0 ? step(Residence::kSharded, 0)
                                                           : std::nullopt;
      case Event::kHold:
        return there ? step(state, 1) : std::nullopt;
      case Event::kRelease:
        return holds > 0 ? step(state, -1) : std::nullopt;
    }
    return std::nullopt;
  }
  std::optional<ModelOfResidency> step(Residence next, int change) const {
    return ModelOfResidency{next, holds + change};
  }
};

void apply(Residency& residency, Event event) {
  switch (event) {
    case Event::kIssued:
      return residency.gather_issued();
    case Event::kFilled:
      return residency.filled();
    case Event::kDropped:
      return residency.gather_dropped();
    case Event::kEmptied:
      return residency.emptied();
    case Event::kHold:
      return residency.hold();
    case Event::kRelease:
      return residency.release();
  }
}

int sequences = 0;

void check_all(const Residency& residency, const ModelOfResidency& model, int depth) {
  EXPECT_EQ(residency.state(), model.state);
  EXPECT_EQ(residency.is_held(), model.holds > 0);
  ++sequences;
  if (depth == 0) return;
  for (int event = 0; event < kEvents; ++event) {
    auto next = residency;
    const auto expected = model.after(static_cast<Event>(event));
    if (!expected) {
      EXPECT_THROW(apply(next, static_cast<Event>(event)), std::logic_error);
      EXPECT_EQ(next.state(), model.state) << "a refused event changes nothing";
      EXPECT_EQ(next.is_held(), model.holds > 0);
      continue;
    }
    apply(next, static_cast<Event>(event));
    check_all(next, *expected, depth - 1);
  }
}

TEST(Residency, FollowsItsTableInEverySequenceOfSixEvents) {
  sequences = 0;
  for (const auto start : {Residence::kSharded, Residence::kBorrowed}) {
    check_all(Residency(start), ModelOfResidency{start}, 6);
  }
  EXPECT_EQ(sequences, 79) << "legal ones, and the start";
}

}  // namespace
}  // namespace fsdp::internal
