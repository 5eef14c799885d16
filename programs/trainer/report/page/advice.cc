#include "programs/trainer/report/page/advice.h"

#include "programs/words.h"

#include <algorithm>
#include <optional>

namespace programs::run_report {
namespace {

std::string rounded(double value, int digits = 0) { return formatted("%.*f", digits, value); }

std::string percent(double share) { return rounded(100 * share) + " %"; }

// "a (3.0 KiB), b (512 bytes) and 7 more"
std::string names_of(const std::vector<UnitRow>& rows) {
  constexpr size_t kMost = 4;
  std::string text;
  for (size_t i = 0; i < std::min(rows.size(), kMost); ++i) {
    const auto& unit = rows[i].unit;
    text += (i == 0 ? "" : ", ") + unit.name + " (" +
            bytes_in_words(static_cast<double>(unit.bytes)) + ")";
  }
  if (rows.size() > kMost) text += " and " + std::to_string(rows.size() - kMost) + " more";
  return text;
}

int64_t bytes_of(const std::vector<UnitRow>& rows) {
  int64_t sum = 0;
  for (const auto& row : rows) sum += row.unit.bytes;
  return sum;
}

double gathers_of(const std::vector<UnitRow>& rows) {
  double sum = 0;
  for (const auto& row : rows) sum += row.gathers;
  return sum;
}

// The root takes what no unit below it has, however little that is.
std::optional<Advice> about_small_units(const RunFacts& run) {
  std::vector<UnitRow> small;
  for (const auto& row : run.units) {
    if (!row.unit.is_root && row.unit.bytes < kSmallUnit) small.push_back(row);
  }
  if (small.empty()) return std::nullopt;
  const auto limit = bytes_in_words(kSmallUnit);
  const bool is_one = small.size() == 1;
  std::string costs = is_one ? "It is" : "They are";
  if (gathers_of(run.units) > 0)
    costs +=
        " " + percent(gathers_of(small) / gathers_of(run.units)) + " of the gathers of a step, and";
  costs += " " + percent(double(bytes_of(small)) / double(bytes_of(run.units))) + " of the bytes.";
  return Advice{"Merge " + counted(int64_t(small.size()), "small unit") + " with " +
                    (is_one ? "its" : "their") + " neighbours",
                names_of(small) + (is_one ? " is" : " are") + " smaller than " + limit + ". " +
                    costs + " Below " + limit +
                    " a gather or a reduction costs what starting it costs, whatever it brings. "
                    "Apply fully_shard to a module around " +
                    (is_one ? "it" : "them") + " (--units blocks), or to several as one unit."};
}

std::optional<Advice> about_a_large_unit(const RunFacts& run) {
  const auto whole = bytes_of(run.units);
  if (whole < kSmallModel) return std::nullopt;
  for (const auto& row : run.units) {
    const double share = double(row.unit.bytes) / double(whole);
    // One parameter cannot be cut into units.
    if (share < kLargeShare || row.unit.parameters == 1) continue;
    const std::string remedy =
        row.unit.is_root ? "Apply fully_shard to every block before the root (--units blocks)."
                         : "Apply fully_shard to the modules below it first.";
    const std::string name = row.unit.is_root ? "the root" : row.unit.name;
    return Advice{"Cut " + name + " into several units",
                  (row.unit.is_root ? "The root" : name) + " holds " + percent(share) +
                      " of the model (from " + percent(kLargeShare) +
                      " on this is told). While it is gathered or reduced no other unit is left "
                      "to compute with, so nothing hides that; and at its peak a rank has the "
                      "parameters or gradients of nearly the whole model. " +
                      remedy};
  }
  return std::nullopt;
}

bool shares_cores(const RunFacts& run) {
  return run.ranks_on_host * run.threads_per_rank > run.cores;
}

struct SlowRank {
  size_t rank;
  double computing_seconds, of_others;
};

// Ranks that share cores are slow in turns, whatever they compute.
std::optional<SlowRank> slow_rank(const RunFacts& run) {
  if (run.ranks.size() < 2 || shares_cores(run)) return std::nullopt;
  const auto slowest = std::max_element(
      run.ranks.begin(), run.ranks.end(),
      [](const auto& a, const auto& b) { return a.computing_seconds < b.computing_seconds; });
  double others = -slowest->computing_seconds;
  for (const auto& rank : run.ranks) others += rank.computing_seconds;
  others /= double(run.ranks.size() - 1);
  const double lost = slowest->computing_seconds - others;
  if (slowest->computing_seconds < kUnequal * others || slowest->slowest < kMostSteps ||
      lost < kLostToUnequal * run.step_seconds)
    return std::nullopt;
  return SlowRank{static_cast<size_t>(slowest - run.ranks.begin()), slowest->computing_seconds,
                  others};
}

std::optional<Advice> about_unequal_ranks(const RunFacts& run) {
  const auto slow = slow_rank(run);
  if (!slow) return std::nullopt;
  return Advice{
      "Give rank " + std::to_string(slow->rank) + " less to do, or look at where it runs",
      "It computes for " + rounded(1e3 * slow->computing_seconds, 1) +
          " ms of a step, the others for " + rounded(1e3 * slow->of_others, 1) + " ms: " +
          rounded(slow->computing_seconds / slow->of_others, 1) + " times as long (told from " +
          rounded(kUnequal, 2) + " times and " + percent(kLostToUnequal) +
          " of the step on, where it is the slowest in " + percent(kMostSteps) +
          " of the steps). The others wait for it at the next gather or reduction. Longer "
          "sequences, more of them, another program on its cores or a slower machine do that."};
}

// A rank that is slower than the others waits for the network alone.
double waiting_of(const RunFacts& run) {
  if (const auto slow = slow_rank(run)) return run.ranks[slow->rank].waiting;
  double sum = 0;
  for (const auto& rank : run.ranks) sum += rank.waiting / double(run.ranks.size());
  return sum;
}

std::string remedies_of_waiting(const RunFacts& run) {
  std::string text;
  if (shares_cores(run))
    text = counted(run.ranks_on_host, "rank") + " of " + counted(run.threads_per_rank, "thread") +
           " share " + counted(run.cores, "core") +
           ": a rank that is waited for is often not even running. Start no more than there are "
           "cores. ";
  if (run.hosts > 1 && run.replicas == 1)
    text += "The ranks that shard are on " + counted(run.hosts, "host") +
            ": with hybrid sharding, --replicas " + std::to_string(run.hosts) +
            ", gathers stay within a host, and reductions of shards alone leave it. ";
  return text + "A larger --batch, or --accumulate, computes more for each gather and reduction.";
}

std::optional<Advice> about_waiting(const RunFacts& run) {
  const double waiting = waiting_of(run);
  if (waiting < kMuchWaiting || run.sharding_ranks * run.replicas == 1) return std::nullopt;
  return Advice{"Let ranks wait less for each other: " + percent(waiting) + " of the time is lost",
                "The host waits for gathers and reductions in " + percent(waiting) +
                    " of the time, medians of steps (told from " + percent(kMuchWaiting) +
                    " on). " + remedies_of_waiting(run)};
}

std::optional<Advice> about_gathers_without_prefetch(const RunFacts& run) {
  std::vector<UnitRow> late;
  double exposed = 0;
  for (const auto& row : run.units) {
    if (row.is_first || row.gathers == 0 || row.prefetched > 0) continue;
    if (row.exposed_seconds < kMuchExposed * run.step_seconds) continue;
    late.push_back(row);
    exposed += row.exposed_seconds;
  }
  if (late.empty() || !run.order_is_known) return std::nullopt;
  return Advice{"Let the gathers of " + counted(int64_t(late.size()), "unit") + " begin earlier",
                names_of(late) + ": never gathered ahead, and the host waits for " +
                    (late.size() == 1 ? "it" : "them") + " in " +
                    percent(exposed / run.step_seconds) + " of the step (told from " +
                    percent(kMuchExposed) +
                    " for a unit on). The order in which units are used changes from step to "
                    "step, or set_unshard_in_backward(false) was called. "
                    "set_modules_to_forward_prefetch and set_modules_to_backward_prefetch say "
                    "what comes next."};
}

std::optional<Advice> about_unused_prefetches(const RunFacts& run) {
  double prefetched = 0, unused = 0;
  for (const auto& row : run.units) {
    prefetched += row.prefetched;
    unused += row.unused;
  }
  if (!run.order_is_known || prefetched == 0 || unused < kManyUnused * prefetched)
    return std::nullopt;
  return Advice{"Use units in one order, or say what comes next",
                percent(unused / prefetched) +
                    " of the gathers ahead were dropped, since another unit was used then (told "
                    "from " +
                    percent(kManyUnused) +
                    " on). Units are expected in the order of the step before; "
                    "set_modules_to_forward_prefetch and set_modules_to_backward_prefetch "
                    "replace that guess."};
}

}  // namespace

std::vector<Advice> advice(const RunFacts& run) {
  std::vector<Advice> result;
  if (run.sharding_ranks * run.replicas == 1) return result;
  for (auto* about : {about_a_large_unit, about_unequal_ranks, about_waiting, about_small_units,
                      about_gathers_without_prefetch, about_unused_prefetches}) {
    if (auto found = about(run)) result.push_back(*std::move(found));
  }
  return result;
}

}  // namespace programs::run_report
