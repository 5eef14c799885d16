#include "device_mesh/collectives/wait_graph.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace fsdp::internal {
namespace {

const LaneProgress* find_lane(const RankWaits& rank, const std::string& lane) {
  const auto found = std::find_if(rank.lanes.begin(), rank.lanes.end(),
                                  [&](const LaneProgress& each) { return each.lane == lane; });
  return found == rank.lanes.end() ? nullptr : &*found;
}

// The threads that could issue on `lane` next.
const std::vector<uint64_t>& issuers_of(const RankWaits& rank, const std::string& lane) {
  const auto* const progress = find_lane(rank, lane);
  return progress != nullptr && !progress->threads.empty() ? progress->threads : rank.threads;
}

const ThreadWait* find_wait(const RankWaits& rank, uint64_t thread) {
  const auto found = std::find_if(rank.waits.begin(), rank.waits.end(),
                                  [&](const ThreadWait& each) { return each.thread == thread; });
  return found == rank.waits.end() ? nullptr : &*found;
}

// Follows waits to those that they depend on; one that may end lets all end.
class Search {
 public:
  explicit Search(const WaitsOfRank& waits_of) : waits_of_(waits_of) {}

  bool is_stuck(int64_t rank, const ThreadWait& wait) {
    const bool known = std::any_of(found_.begin(), found_.end(), [&](const StuckThread& each) {
      return each.rank == rank && each.wait.thread == wait.thread;
    });
    if (known) return true;
    found_.push_back({rank, wait});
    const auto other = waits_of_(wait.for_rank);
    return other && cannot_issue(wait.for_rank, *other, wait);
  }
  std::vector<StuckThread> take() { return std::move(found_); }

 private:
  bool cannot_issue(int64_t rank, const RankWaits& waits, const ThreadWait& awaited) {
    if (waits.has_issued(awaited.lane, awaited.operation)) return false;  // it is on its way
    if (waits.verdict.covers(awaited.lane)) return true;
    const auto issuers = issuers_of(waits, awaited.lane);
    return !issuers.empty() && std::all_of(issuers.begin(), issuers.end(), [&](uint64_t thread) {
      const auto* wait = find_wait(waits, thread);
      return wait != nullptr && is_stuck(rank, *wait);
    });
  }

  const WaitsOfRank& waits_of_;
  std::vector<StuckThread> found_;
};

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// The rest of a line, behind one space.
bool take_rest(std::istream& fields, std::string& rest) {
  return fields.get() == ' ' && std::getline(fields, rest);
}

bool parse_lane(std::istream& fields, LaneProgress& lane) {
  constexpr size_t kMost = 4096;
  size_t count = 0;
  if (!(fields >> lane.issued >> count) || count > kMost) return false;
  lane.threads.resize(count);
  for (auto& thread : lane.threads) fields >> thread;
  return take_rest(fields, lane.lane);
}

bool parse_wait(std::istream& fields, ThreadWait& wait) {
  fields >> wait.thread >> wait.wait >> wait.operation >> wait.for_rank;
  return take_rest(fields, wait.lane);
}

bool parse_line(const std::string& line, RankWaits& waits) {
  std::istringstream fields(line);
  std::string kind;
  fields >> kind;
  if (kind == "beat") return static_cast<bool>(fields >> waits.beat);
  if (kind == "lane") return parse_lane(fields, waits.lanes.emplace_back());
  if (kind == "wait") return parse_wait(fields, waits.waits.emplace_back());
  if (kind == "what") return !waits.waits.empty() && take_rest(fields, waits.waits.back().what);
  if (kind == "verdict") return take_rest(fields, waits.verdict.text);
  if (kind == "refused") return take_rest(fields, waits.verdict.lanes.emplace_back());
  if (kind != "threads") return false;
  for (uint64_t thread = 0; fields >> thread;) waits.threads.push_back(thread);
  return true;
}

}  // namespace

bool Verdict::covers(const std::string& lane) const {
  return std::find(lanes.begin(), lanes.end(), lane) != lanes.end();
}

bool RankWaits::has_issued(const std::string& lane, uint64_t operation) const {
  return std::any_of(lanes.begin(), lanes.end(), [&](const LaneProgress& each) {
    return each.lane == lane && each.issued >= operation;
  });
}

std::string to_text(const RankWaits& waits) {
  std::ostringstream text;
  text << "beat " << waits.beat << "\nthreads";
  for (const auto thread : waits.threads) text << ' ' << thread;
  text << '\n';
  for (const auto& lane : waits.lanes) {
    text << "lane " << lane.issued << ' ' << lane.threads.size();
    for (const auto thread : lane.threads) text << ' ' << thread;
    text << ' ' << one_line(lane.lane) << '\n';
  }
  for (const auto& wait : waits.waits) {
    text << "wait " << wait.thread << ' ' << wait.wait << ' ' << wait.operation << ' '
         << wait.for_rank << ' ' << one_line(wait.lane) << "\nwhat " << one_line(wait.what) << '\n';
  }
  if (!waits.verdict.text.empty()) text << "verdict " << one_line(waits.verdict.text) << '\n';
  for (const auto& lane : waits.verdict.lanes) text << "refused " << one_line(lane) << '\n';
  return text.str();
}

std::optional<RankWaits> parse_rank_waits(const std::string& text) {
  RankWaits waits;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!parse_line(line, waits)) return std::nullopt;
  }
  return waits;
}

std::vector<StuckThread> stuck_with(int64_t rank, const ThreadWait& wait,
                                    const WaitsOfRank& waits_of) {
  Search search(waits_of);
  if (!search.is_stuck(rank, wait)) return {};
  return search.take();
}

Verdict verdict_on(std::vector<StuckThread> threads) {
  std::stable_sort(threads.begin(), threads.end(),
                   [](const auto& a, const auto& b) { return a.rank < b.rank; });
  Verdict verdict;
  std::ostringstream text;
  text << "collectives are out of order: ";
  for (const auto& [rank, wait] : threads) {
    text << "rank " << rank << " waits in the " << wait.what;
    if (wait.operation == kNoOperation) {
      text << " for rank " << wait.for_rank << "; ";
    } else {
      text << " (operation " << wait.operation << " of its group), which rank " << wait.for_rank
           << " has not issued; ";
    }
    if (!verdict.covers(wait.lane)) verdict.lanes.push_back(wait.lane);
  }
  text << "so none of them can go on. Every rank must issue the same collectives in the same "
          "order: touch the sharded units alike (one in a loop whose length differs between "
          "ranks stays gathered with reshard_after_forward = false and "
          "set_reshard_after_backward(false)); docs/launching.md says what a rank does that has "
          "less to do";
  verdict.text = text.str();
  return verdict;
}

}  // namespace fsdp::internal
