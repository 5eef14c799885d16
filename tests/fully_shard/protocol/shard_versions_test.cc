#include "fully_shard/transport/shard_versions.h"

#include "tests/support/instrumented.h"
#include "tests/support/number_from_environment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

// Explores every interleaving of the very code of shard_versions.h, one access to shared
// memory at a time. Each rank has a buffer of stores that become visible later, in any
// order but for stores to one place, and what a release store or a fence holds back: at
// least as weak as x86's memory.
//
// An operation is run again from its beginning for each of its accesses, with what its
// loads gave before: so it is plain code here, as it is in the library.
namespace fsdp::internal {
namespace {

// What a rank does, one letter each:
//   w  an operator writes the unit       r  reads all ranks' shards
//   e  a backward ends                   x  gives an alias out, writes through it, and says so
//   i  begins to read the shards where they lie, if all ranks' can be read so; else as r
//   u  looks at them there, once more
//   l  leaves, at the end of every program
using Program = std::string;

constexpr size_t kMaxRanks = 3, kHalves = 2, kCopies = 6;
constexpr size_t kPlaces = VersionWord::kCount;        // where all ranks' shards lie, then others
constexpr size_t kLeft = kPlaces + kCopies * kHalves;  // 1: its program is over
constexpr size_t kCells = kLeft + 1;                   // of a rank

struct Store {
  uint8_t cell;
  uint8_t value;
  bool releases;

  bool operator==(const Store&) const = default;
};

struct Rank {
  ShardVersions versions;
  uint8_t at = 0, stage = 0, peer = 0;  // in its program, in that operation, for that rank
  uint8_t copies = 0;                   // made so far
  uint8_t place = 0;                    // where it writes
  uint8_t common_kept = 0;              // the run whose last version it has left in place 0
  bool failed = false, mixed = false, in_place = false;
  std::vector<uint8_t> loaded;  // by the operation's loads so far
  std::vector<uint8_t> stored;  // stores that the operation has made, by their number
  std::vector<Store> buffer;
};

struct State {
  std::array<std::array<uint8_t, kCells>, kMaxRanks> memory{};
  std::array<Rank, kMaxRanks> ranks;
};

std::string key_of(const State& state, size_t ranks) {
  std::string key;
  for (size_t r = 0; r < ranks; ++r) {
    const auto& rank = state.ranks[r];
    key.append(state.memory[r].begin(), state.memory[r].end());
    const auto version = rank.versions.version();
    for (const uint64_t each :
         {version.run, version.start, version.count, uint64_t{rank.versions.is_writing()},
          uint64_t{rank.versions.is_in_run()}, uint64_t{rank.versions.is_exposed()},
          uint64_t{rank.versions.is_published()}, uint64_t{rank.at}, uint64_t{rank.stage},
          uint64_t{rank.peer}, uint64_t{rank.copies}, uint64_t{rank.place},
          uint64_t{rank.common_kept}, uint64_t{rank.in_place}, uint64_t{rank.failed},
          uint64_t{rank.mixed}, uint64_t{rank.loaded.size()}, uint64_t{rank.stored.size()},
          uint64_t{rank.buffer.size()}})
      key.push_back(static_cast<char>(each));
    key.append(rank.loaded.begin(), rank.loaded.end());
    for (const auto& store : rank.buffer) {
      key.push_back(static_cast<char>(store.cell));
      key.push_back(static_cast<char>(store.value));
    }
  }
  return key;
}

struct OneAccessDone {};
struct Blocked {};

// Of one operation that is run again: what it did before is not done again.
class Replay {
 public:
  // kAtOnce: all accesses, and none of its stores is kept, to see whether it blocks.
  enum class Until { kNextAccess, kAtOnce };
  Replay(State& state, size_t self, Until until = Until::kNextAccess)
      : state_(state), self_(self), until_(until) {}

  uint8_t load(size_t of_rank, size_t cell) {
    auto& rank = state_.ranks[self_];
    if (until_ == Until::kAtOnce) return seen(of_rank, cell);
    if (next_load_ < rank.loaded.size()) return rank.loaded[next_load_++];
    rank.loaded.push_back(seen(of_rank, cell));
    throw OneAccessDone{};
  }
  void store(size_t cell, uint64_t value, bool releases) {
    if (until_ == Until::kAtOnce || was_done()) return;
    state_.ranks[self_].buffer.push_back(
        {static_cast<uint8_t>(cell), static_cast<uint8_t>(value), releases});
    throw OneAccessDone{};
  }
  // What was stored before is visible when it is over.
  void fence() {
    if (until_ == Until::kAtOnce) return;
    if (next_store_ < state_.ranks[self_].stored.size()) return void(++next_store_);
    if (!state_.ranks[self_].buffer.empty()) throw Blocked{};
    state_.ranks[self_].stored.push_back(0);
    throw OneAccessDone{};
  }

 private:
  bool was_done() {
    auto& stored = state_.ranks[self_].stored;
    if (next_store_ < stored.size()) return ++next_store_, true;
    stored.push_back(0);
    return false;
  }
  uint8_t seen(size_t of_rank, size_t cell) const {
    if (of_rank == self_) {
      const auto& buffer = state_.ranks[self_].buffer;
      for (auto each = buffer.rbegin(); each != buffer.rend(); ++each) {
        if (each->cell == cell) return each->value;
      }
    }
    return state_.memory[of_rank][cell];
  }

  State& state_;
  size_t self_;
  Until until_;
  size_t next_load_ = 0, next_store_ = 0;
};

// The line of a rank, as another one or it itself sees it.
class ModelLine {
 public:
  ModelLine(Replay& replay, size_t of_rank) : replay_(replay), of_rank_(of_rank) {}
  // kNoEnd has its byte.
  uint64_t load(size_t word) {
    const auto value = replay_.load(of_rank_, word);
    return value == 0xff ? kNoEnd : value;
  }
  void store(size_t word, uint64_t value) { replay_.store(word, value, false); }
  void release(size_t word, uint64_t value) { replay_.store(word, value, true); }
  void fence() { replay_.fence(); }
  void read_fence() {}

 private:
  Replay& replay_;
  size_t of_rank_;
};

struct Outcome {
  bool is_stuck = false, is_mixed = false;
  bool some_fail = false, some_finish = false;
};

// How many states are looked at: some under sanitizers, where all would take an hour.
#ifdef FSDP_INSTRUMENTED
constexpr size_t kMostStates = 20'000;
#else
constexpr size_t kMostStates = std::numeric_limits<size_t>::max();
#endif

class Explorer {
 public:
  explicit Explorer(std::vector<Program> programs) : programs_(std::move(programs)) {
    for (auto& each : programs_) each += 'l';
  }

  Outcome run() {
    State first;
    for (size_t r = 0; r < size(); ++r) start(first, r);
    add(first);
    for (size_t i = 0; i < kMostStates && !todo_.empty(); ++i) {
      const State state = std::move(todo_.back());
      todo_.pop_back();
      visit(state);
    }
    return outcome_;
  }

  // One interleaving, drawn.
  Outcome wander(std::mt19937& random) {
    State state;
    for (size_t r = 0; r < size(); ++r) start(state, r);
    while (true) {
      seen_.clear();
      todo_.clear();
      seen_.insert(key_of(state, size()));
      visit(state);
      if (todo_.empty()) return outcome_;
      state = todo_[random() % todo_.size()];
    }
  }

 private:
  size_t size() const { return programs_.size(); }

  // The memory as it is made, before another rank can see it: a run is open, and its
  // first operator has written.
  static void start(State& state, size_t self) {
    struct Direct {
      std::array<uint8_t, kCells>& cells;
      void store(size_t word, uint64_t value) { cells[word] = static_cast<uint8_t>(value); }
      void release(size_t word, uint64_t value) { store(word, value); }
      void fence() {}
    } line{state.memory[self]};
    auto& versions = state.ranks[self].versions;
    versions.open(line, {});
    versions.begin(line);
    for (size_t half = 0; half < kHalves; ++half) line.store(kPlaces + half, 1);
    versions.end(line, 0);
    versions.close();
  }

  bool is_over(const Rank& rank, size_t self) const {
    return rank.failed || rank.at == programs_[self].size();
  }

  void visit(const State& state) {
    bool is_still = true, all_over = true;  // nothing can happen
    for (size_t r = 0; r < size(); ++r) {
      const auto& rank = state.ranks[r];
      outcome_.is_mixed |= rank.mixed;
      outcome_.some_fail |= rank.failed;
      flush(state, r);
      is_still = is_still && rank.buffer.empty();
      if (is_over(rank, r)) continue;
      all_over = false;
      is_still = is_still && blocks(state, r);
      step(state, r);
    }
    if (all_over && is_still) outcome_.some_finish |= !has_failed(state);
    if (!all_over && is_still && !has_failed(state)) outcome_.is_stuck = true;
  }
  bool blocks(State state, size_t self) {
    try {
      Replay replay(state, self, Replay::Until::kAtOnce);
      Rank worked = state.ranks[self];
      perform(replay, state, worked, self);
    } catch (const Blocked&) {
      return true;
    }
    return false;
  }
  bool has_failed(const State& state) const {
    for (size_t r = 0; r < size(); ++r) {
      if (state.ranks[r].failed) return true;  // who waits for it is told so
    }
    return false;
  }

  // A store becomes visible: one that nothing holds back.
  void flush(const State& state, size_t self) {
    const auto& buffer = state.ranks[self].buffer;
    for (size_t i = 0; i < buffer.size(); ++i) {
      bool held_back = buffer[i].releases && i > 0;
      for (size_t before = 0; before < i; ++before)
        held_back |= buffer[before].cell == buffer[i].cell;
      if (held_back) continue;
      State next = state;
      next.memory[self][buffer[i].cell] = buffer[i].value;
      auto& left = next.ranks[self].buffer;
      left.erase(left.begin() + static_cast<int64_t>(i));
      add(next);
    }
  }

  void step(const State& state, size_t self) {
    State next = state;
    // What an operation leaves behind is there when it is over; until then, what it has
    // loaded and how much it has stored.
    Rank worked = next.ranks[self];
    try {
      Replay replay(next, self);
      perform(replay, next, worked, self);
      auto& rank = next.ranks[self];
      worked.buffer = rank.buffer;
      rank = std::move(worked);
      rank.loaded.clear();
      rank.stored.clear();
    } catch (const OneAccessDone&) {
    } catch (const Blocked&) {
      // Of a fence: it waits for the buffer. Of a reader: it looks anew.
      if (!next.ranks[self].stored.empty() || !next.ranks[self].buffer.empty()) return;
      next.ranks[self].loaded.clear();
    }
    add(next);
  }

  void perform(Replay& replay, State& state, Rank& rank, size_t self) {
    switch (programs_[self][rank.at]) {
      case 'w':
        return write(replay, rank, self, /*told=*/true);
      case 'x':
        return write_alias(replay, rank, self);
      case 'l':
        replay.store(kLeft, 1, /*releases=*/true);
        return next_operation(rank);
      case 'e':
        if (rank.versions.is_exposed() && !rank.versions.is_published())
          return publish(replay, rank, self);
        rank.versions.close();
        return next_operation(rank);
      case 'u':
        return use(replay, rank, self);
      default:
        return read(replay, state, rank, self);
    }
  }

  static void next_operation(Rank& rank) {
    ++rank.at;
    rank.stage = rank.peer = 0;
  }

  static size_t cell_of(uint64_t place, size_t half) { return kPlaces + place * kHalves + half; }

  // A copy of what is there, at `place`.
  static void copy_to(Replay& replay, const Rank& rank, size_t self, uint64_t place) {
    for (size_t half = 0; half < kHalves; ++half)
      replay.store(cell_of(place, half), replay.load(self, cell_of(rank.place, half)), false);
  }
  static uint8_t other_place(Rank& rank) {
    return static_cast<uint8_t>(1 + rank.copies++ % (kCopies - 1));
  }
  // Where the version before stays is told by its place plus 1. Aliases of where the rank
  // writes may be out: there it stays.
  static uint64_t keep(Replay& replay, Rank& rank, size_t self) {
    const bool common_is_free = rank.place != 0 && rank.common_kept == 0;
    const uint8_t place =
        common_is_free && !rank.versions.is_exposed() ? uint8_t{0} : other_place(rank);
    copy_to(replay, rank, self, place);
    if (rank.versions.is_exposed()) return uint64_t{place} + 1;
    const auto left = rank.place;
    if (left == 0) rank.common_kept = static_cast<uint8_t>(rank.versions.version().run);
    rank.place = place;
    return uint64_t{left} + 1;
  }
  void publish(Replay& replay, Rank& rank, size_t self) {
    ModelLine line(replay, self);
    const auto kept = keep(replay, rank, self);
    rank.versions.publish(line, kept, 0);
  }

  void open_run(Replay& replay, Rank& rank, size_t self) {
    ModelLine line(replay, self);
    bool may_want_this = false;
    uint64_t least = kNoEnd;
    for (size_t peer = 0; peer < size(); ++peer) {
      if (peer == self) continue;
      const auto past = ModelLine(replay, peer).load(VersionWord::kPast);
      if (rank.versions.may_want_oldest(past)) throw Blocked{};
      may_want_this |= rank.versions.may_want_this(past);
      least = std::min(least, past);
    }
    if (rank.common_kept < least) rank.common_kept = 0;
    const bool keeps = may_want_this && !rank.versions.is_published();
    const uint64_t kept = keeps ? keep(replay, rank, self) : 0;
    const bool goes_back = rank.place != 0 && rank.common_kept == 0 && !keeps;
    if (goes_back && !rank.versions.is_exposed()) {
      copy_to(replay, rank, self, 0);
      rank.place = 0;
    }
    rank.versions.open(line, {.place = rank.place, .kept = kept});
  }

  void store_bytes(Replay& replay, const Rank& rank) {
    for (size_t half = 0; half < kHalves; ++half)
      replay.store(cell_of(rank.place, half), rank.versions.version().count, false);
  }

  // In stages, so that what is run again is short.
  void write(Replay& replay, Rank& rank, size_t self, bool told) {
    ModelLine line(replay, self);
    rank.in_place = false;
    switch (rank.stage++) {
      case 0:
        if (!rank.versions.is_in_run()) rank.versions.pass(line);
        return;
      case 1:
        if (!rank.versions.is_in_run()) open_run(replay, rank, self);
        return;
      case 2:
        return rank.versions.begin(line);
      case 3:
        for (size_t peer = 0; peer < size(); ++peer) {
          if (peer == self || rank.versions.is_first_of_run()) continue;
          rank.failed |= rank.versions.was_read(ModelLine(replay, peer).load(VersionWord::kRead));
        }
        return;
      case 4:
        if (told) store_bytes(replay, rank);
        return;
      default:
        rank.versions.end(line, 0);
        return next_operation(rank);
    }
  }

  // Exposed, written, and said afterwards.
  void write_alias(Replay& replay, Rank& rank, size_t self) {
    ModelLine line(replay, self);
    if (!rank.versions.is_exposed()) {
      if (!rank.versions.is_published()) return publish(replay, rank, self);
      return rank.versions.expose(line);
    }
    if (rank.peer == 0) {  // through the alias: counts as the operator that is told below
      for (size_t half = 0; half < kHalves; ++half)
        replay.store(cell_of(rank.place, half), rank.versions.version().count + 1, false);
      rank.peer = 1;
      return;
    }
    write(replay, rank, self, /*told=*/false);
  }

  void read(Replay& replay, State&, Rank& rank, size_t self) {
    ModelLine own(replay, self);
    const bool may_stay = programs_[self][rank.at] == 'i';
    switch (rank.stage) {
      case 0:
        if (rank.versions.is_exposed() && !rank.versions.is_published())
          return publish(replay, rank, self);
        rank.versions.close();
        rank.in_place = may_stay;
        rank.stage = 1;
        return;
      case 1:
        rank.stage = 2;
        if (may_stay) return rank.versions.read(own);
        break;
      default:
        break;
    }
    if (rank.peer == self) ++rank.peer;
    if (rank.peer >= size()) return next_operation(rank);
    ModelLine line(replay, rank.peer);
    const auto wanted = rank.versions.version();
    const bool has_left = replay.load(rank.peer, kLeft) == 1;  // before the last look
    const auto found = look(line, wanted);
    if (found.found == Found::kNotYet && !has_left) throw Blocked{};
    if (found.found == Found::kNever || found.found == Found::kNotYet) {
      rank.failed = true;
      return;
    }
    const bool is_live = found.found == Found::kLive;
    rank.in_place = rank.in_place && is_live && found.place == 0;
    const auto place = is_live ? found.place : found.place - 1;
    bool is_right = is_live || found.place > 0;
    for (size_t half = 0; is_right && half < kHalves; ++half)
      is_right = replay.load(rank.peer, cell_of(place, half)) == wanted.count && is_right;
    if (is_live && !still_live(line, wanted)) return;  // looks again
    rank.mixed |= !is_right;
    ++rank.peer;
  }

  // No second look.
  void use(Replay& replay, Rank& rank, size_t self) {
    for (size_t peer = 0; rank.in_place && peer < size(); ++peer) {
      for (size_t half = 0; peer != self && half < kHalves; ++half) {
        const auto seen = replay.load(peer, cell_of(0, half));
        rank.mixed |= seen != rank.versions.version().count;
      }
    }
    next_operation(rank);
  }

  void add(const State& state) {
    if (seen_.insert(key_of(state, size())).second) todo_.push_back(state);
  }

  std::vector<Program> programs_;
  std::vector<State> todo_;
  std::unordered_set<std::string> seen_;
  Outcome outcome_;
};

Outcome explore(const std::vector<Program>& programs) { return Explorer(programs).run(); }

std::string in_words(const std::vector<Program>& programs) {
  std::string words;
  for (const auto& each : programs) words += each + " ";
  return words;
}

void expect_right(const std::vector<Program>& programs) {
  SCOPED_TRACE(in_words(programs));
  const auto outcome = explore(programs);
  EXPECT_FALSE(outcome.is_mixed);
  EXPECT_FALSE(outcome.is_stuck);
  EXPECT_FALSE(outcome.some_fail);
  EXPECT_TRUE(outcome.some_finish);
}

// In one interleaving, drawn.
void expect_right_once(const std::vector<Program>& programs, std::mt19937& random) {
  SCOPED_TRACE(in_words(programs));
  const auto outcome = Explorer(programs).wander(random);
  ASSERT_FALSE(outcome.is_mixed || outcome.is_stuck || outcome.some_fail);
  ASSERT_TRUE(outcome.some_finish);
}

// Some rank has an error, in every run, and none reads a mixture.
void expect_error(const std::vector<Program>& programs) {
  SCOPED_TRACE(in_words(programs));
  const auto outcome = explore(programs);
  EXPECT_FALSE(outcome.is_mixed);
  EXPECT_FALSE(outcome.is_stuck);
  EXPECT_FALSE(outcome.some_finish);
}

TEST(ShardVersions, RanksThatDoTheSame) {
  expect_right({"wwer", "wwer"});
  if (testing::is_night()) expect_right({"rwre", "rwre"});
}

TEST(ShardVersions, OneRankAloneReads) { expect_right({"rwr", "w"}); }

TEST(ShardVersions, OneRankIsAhead) { expect_right({"wer", "rwe"}); }

// All interleavings of this would take a minute: many are drawn.
TEST(ShardVersions, OneRankIsRunsAhead) {
  std::mt19937 random(2);
  for (int i = 0; i < 2000 && !HasFatalFailure(); ++i) expect_right_once({"wewr", "rwew"}, random);
}

TEST(ShardVersions, ShardsThatAreReadWhereTheyLie) {
  expect_right({"iuwiu", "wiu"});
  expect_right({"iuw", "iuw"});
  if (testing::is_night()) expect_right({"iuewiu", "wiuew"});
  expect_right({"iuwu", "ww"});
}

TEST(ShardVersions, ShardsAreReadWhereTheyLieBesideAliases) {
  expect_right({"iuwu", "xu"});
  expect_right({"iuwr", "xr"});
}

// The one that writes more finds it, before it does.
TEST(ShardVersions, ShardsThatAreWrittenWhileTheyAreReadWhereTheyLie) {
  expect_error({"wiuuwr", "wwr"});
  expect_error({"wiuu", "wwr"});
}

TEST(ShardVersions, AliasesThatAreWritten) {
  expect_right({"xr", "xr"});
  expect_right({"rwr", "xr"});
  if (testing::is_night()) expect_right({"rxr", "rwr"});
}

// A read between two writes, on one rank alone.
TEST(ShardVersions, ReadsThatCutARunInTwo) {
  expect_error({"wrwr", "wwr"});
  if (testing::is_night()) expect_error({"xrwr", "wwr"});
}

TEST(ShardVersions, WritesOfOneRankAlone) {
  expect_error({"wr", "r"});
  expect_error({"wr", ""});
  expect_error({"wwr", "wr"});
}

// All ranks write alike in each step, and each reads as often as it likes; some write
// through aliases.
std::vector<Program> draw_programs(std::mt19937& random) {
  std::vector<Program> programs(2 + random() % 2);
  const auto steps = 1 + random() % 4;
  for (size_t step = 0; step < steps; ++step) {
    const auto writes = random() % 3;
    for (auto& each : programs) {
      for (size_t i = 0; i < writes; ++i) each += random() % 4 == 0 ? 'x' : 'w';
      for (auto reads = random() % 3; reads > 0; --reads) each += random() % 2 == 0 ? "r" : "iuu";
      each += 'e';
    }
  }
  return programs;
}

TEST(ShardVersions, RandomProgramsOfTwoAndThreeRanks) {
  std::mt19937 random(1);
  const auto programs = testing::number_from_environment("FSDP_PROGRAMS", 1500);
  for (uint64_t i = 0; i < programs; ++i) {
    expect_right_once(draw_programs(random), random);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace fsdp::internal
