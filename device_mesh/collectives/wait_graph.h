// Which ranks wait for which, as each tells the others, and whether some of them wait for
// one another for ever. Pure.
//
// An operation of a process group can end only when all its ranks have issued it. A rank
// that has not can still do so as long as one of the threads that issue its collectives
// does something else than wait. Where none does, and what each of them waits for can
// come as little, nothing more will happen: a gather on one rank against a reduction on
// another, each before the other's.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

// Of what another rank does by itself, such as a write that is waited for: it is never
// issued, and comes as long as a thread that issues there does something else than wait.
inline constexpr uint64_t kNoOperation = ~uint64_t{0};

// A thread that waits for an operation until `for_rank` has issued it as well.
struct ThreadWait {
  uint64_t thread = 0;     // a number of its own among all threads of its process
  uint64_t wait = 0;       // likewise, among all waits
  uint64_t operation = 0;  // 1, 2, ... on the lane; or kNoOperation
  int64_t for_rank = -1;
  std::string lane = {};  // the group, by a name that all its ranks have for it
  std::string what = {};  // "all-gather of unit 'l0'"

  bool operator==(const ThreadWait&) const = default;
};

// How far a rank is on one group, and the living threads that issue there.
struct LaneProgress {
  uint64_t issued = 0;
  std::vector<uint64_t> threads = {};
  std::string lane = {};

  bool operator==(const LaneProgress&) const = default;
};

// That nothing more is issued on some groups, since ranks waited for one another.
struct Verdict {
  std::string text = {};
  std::vector<std::string> lanes = {};

  bool covers(const std::string& lane) const;
  bool operator==(const Verdict&) const = default;
};

// What a rank tells the others while it waits.
struct RankWaits {
  uint64_t beat = 0;  // grows by one each time it is told
  std::vector<ThreadWait> waits = {};
  std::vector<LaneProgress> lanes = {};
  std::vector<uint64_t> threads = {};  // the living ones that ever issued anything
  Verdict verdict = {};                // of this rank

  bool has_issued(const std::string& lane, uint64_t operation) const;
  bool operator==(const RankWaits&) const = default;
};

std::string to_text(const RankWaits& waits);
// None for text of another form.
std::optional<RankWaits> parse_rank_waits(const std::string& text);

// One of those who wait for one another.
struct StuckThread {
  int64_t rank = -1;
  ThreadWait wait = {};

  bool operator==(const StuckThread&) const = default;
};

// What a rank told last: none where it does not wait.
using WaitsOfRank = std::function<std::optional<RankWaits>(int64_t rank)>;

// The thread that waits in `wait` of `rank`, and all whose waits it depends on, where
// nothing that they wait for can come; else nothing. `waits_of` is asked only for ranks
// that are met.
std::vector<StuckThread> stuck_with(int64_t rank, const ThreadWait& wait,
                                    const WaitsOfRank& waits_of);

// An error's text: every rank of `threads`, the operation that it waits in and the rank
// that has not issued it.
Verdict verdict_on(std::vector<StuckThread> threads);

}  // namespace fsdp::internal
