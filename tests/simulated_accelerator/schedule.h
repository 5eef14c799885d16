// Schedules: when the items of a stream run, as late as possible or at once.
//
// Of two accesses that nothing orders, the later one overtakes the earlier one when the
// stream of the later one runs at once and all others are late, since nothing that it
// does not wait for has run then. So the late schedule and one eager schedule for each
// stream show every fault that changes a value, and nothing is left to chance.
//
//   for (const auto& schedule : schedules(/*streams=*/2)) {  // early, late, eager 0, eager 1
//     const auto report = run_in({.schedule = schedule}, [] { ... });
//   }
#pragma once

#include <string>
#include <vector>

namespace fsdp::testing::simulated {

struct Schedule {
  enum class Kind {
    kEarly,  // everything at once, in the order of issue
    kLate,   // an item runs when something that must wait for it is forced
    kEager,  // one stream of each device at once, with what it waits for; all others late
  };

  Kind kind = Kind::kEarly;
  int stream = 0;  // of kEager: 0 is the default stream, others in the order they were made

  bool operator==(const Schedule&) const = default;

  bool runs_at_once(int of_stream) const {
    return kind == Kind::kEarly || (kind == Kind::kEager && stream == of_stream);
  }
};

inline constexpr Schedule kLate = {Schedule::Kind::kLate};
constexpr Schedule eager(int stream) { return {Schedule::Kind::kEager, stream}; }

inline std::string to_string(const Schedule& schedule) {
  switch (schedule.kind) {
    case Schedule::Kind::kEarly:
      return "early";
    case Schedule::Kind::kLate:
      return "late";
    case Schedule::Kind::kEager:
      return "eager " + std::to_string(schedule.stream);
  }
  return "unknown";
}

// All that a program with `streams` streams on a device, the default one among them, can
// tell apart.
inline std::vector<Schedule> schedules(int streams) {
  std::vector<Schedule> all = {{Schedule::Kind::kEarly}, kLate};
  for (int stream = 0; stream < streams; ++stream) all.push_back(eager(stream));
  return all;
}

}  // namespace fsdp::testing::simulated
