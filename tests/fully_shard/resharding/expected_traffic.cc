#include "tests/fully_shard/resharding/expected_traffic.h"

#include <algorithm>
#include <functional>
#include <ostream>

namespace fsdp::testing {
namespace {

constexpr int64_t kElementBytes = 8;

// Everything in a row starts at a multiple of 64 bytes.
int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The first rank's part is the largest: as torch.chunk cuts.
int64_t part_bytes(const ParameterSize& parameter, int64_t ranks) {
  return (parameter.rows + ranks - 1) / ranks * parameter.columns * kElementBytes;
}

// A row of a gather has room for the largest part of every parameter.
int64_t gathered_row(const UnitSize& unit, int64_t ranks) {
  int64_t bytes = 0;
  for (const auto& parameter : unit) bytes += padded(part_bytes(parameter, ranks));
  return bytes;
}

// A row of a reduction has the same of trainable ones, used or not, a flag for each of
// them, and a flag for late gradients.
int64_t reduced_row(const UnitSize& unit, int64_t ranks) {
  int64_t bytes = 0, flags = 1;
  for (const auto& parameter : unit) {
    if (!parameter.is_trainable) continue;
    bytes += padded(part_bytes(parameter, ranks));
    ++flags;
  }
  return bytes + padded(flags * kElementBytes);
}

// Gradients that wait are those of trainable parameters that were used, without padding.
int64_t waiting_bytes(const UnitSize& unit, int64_t ranks) {
  int64_t bytes = 0;
  for (const auto& parameter : unit) {
    if (parameter.is_trainable && parameter.is_used) bytes += part_bytes(parameter, ranks);
  }
  return bytes;
}

std::vector<UnitSize> units_of(const ChainSize& chain) {
  auto units = chain.blocks;
  units.push_back(chain.root);
  return units;
}

int64_t sum(const std::vector<UnitSize>& units,
            const std::function<int64_t(const UnitSize&)>& bytes_of) {
  int64_t bytes = 0;
  for (const auto& unit : units) bytes += bytes_of(unit);
  return bytes;
}

int64_t largest(const std::vector<UnitSize>& units,
                const std::function<int64_t(const UnitSize&)>& bytes_of) {
  int64_t bytes = 0;
  for (const auto& unit : units) bytes = std::max(bytes, bytes_of(unit));
  return bytes;
}

bool has_unused(const UnitSize& unit) {
  return std::any_of(unit.begin(), unit.end(),
                     [](const auto& parameter) { return !parameter.is_used; });
}

// A gather brings the rows of the other ranks; it is issued ahead or when it is needed.
void add_gather(const UnitSize& unit, int64_t ranks, bool ahead, StepTraffic& step) {
  ++step.all_gathers;
  step.prefetched_all_gathers += ahead;
  step.all_gather_bytes += (ranks - 1) * gathered_row(unit, ranks);
}

void add_gathers(const ChainSize& chain, const ChainPolicy& policy, StepTraffic& step) {
  // A rank that has all shards borrows them.
  if (policy.shards == 1) return;
  // The root comes first, when nothing is known of what follows, and stays.
  add_gather(chain.root, policy.shards, /*ahead=*/false, step);
  // Each other gather is issued when the unit before is entered: every block in forward,
  for (const auto& block : chain.blocks) add_gather(block, policy.shards, /*ahead=*/true, step);
  // and in backward those that did not stay. The last one does, since it is the first
  // there.
  if (policy.keeps == Keeps::kAll) return;
  const auto ranks = policy.keeps == Keeps::kPart ? policy.neighbours : policy.shards;
  for (size_t i = 0; i + 1 < chain.blocks.size(); ++i)
    add_gather(chain.blocks[i], ranks, /*ahead=*/true, step);
}

void add_reductions(const ChainSize& chain, const ChainPolicy& policy, bool is_last,
                    StepTraffic& step) {
  // Without other ranks nothing is reduced; without synchronisation only at last.
  if (policy.shards == 1) return;
  if (policy.accumulation == Accumulation::kNoSync && !is_last) return;
  const bool over_replicas = policy.accumulation != Accumulation::kShardsOnly || is_last;
  // Each unit reduces once, over its shards and then over the replicas, used or not.
  for (const auto& unit : units_of(chain)) {
    ++step.reduce_scatters;
    step.reduce_scatter_bytes += (policy.shards - 1) * reduced_row(unit, policy.shards);
    if (policy.replicas > 1 && over_replicas) ++step.all_reduces;
  }
}

// Whole gradients wait without synchronisation, sums over the shards for the replicas.
int64_t waiting_bytes(const ChainSize& chain, const ChainPolicy& policy) {
  const bool waits_whole = policy.accumulation == Accumulation::kNoSync;
  const bool waits_in_shards =
      policy.accumulation == Accumulation::kShardsOnly && policy.replicas > 1;
  if (!waits_whole && !waits_in_shards) return 0;
  const auto ranks = waits_whole ? 1 : policy.shards;
  return sum(units_of(chain), [=](const UnitSize& unit) { return waiting_bytes(unit, ranks); });
}

}  // namespace

int64_t micro_batches(Accumulation accumulation) {
  return accumulation == Accumulation::kOff ? 1 : 2;
}

std::ostream& operator<<(std::ostream& out, const StepTraffic& traffic) {
  return out << traffic.all_gathers << " gathers (" << traffic.prefetched_all_gathers
             << " ahead) of " << traffic.all_gather_bytes << " bytes, " << traffic.reduce_scatters
             << " reduce-scatters of " << traffic.reduce_scatter_bytes << " bytes, "
             << traffic.all_reduces << " all-reduces";
}

StepTraffic expected_traffic(const ChainSize& chain, const ChainPolicy& policy) {
  StepTraffic step;
  for (int64_t left = micro_batches(policy.accumulation); left > 0; --left) {
    add_gathers(chain, policy, step);
    add_reductions(chain, policy, /*is_last=*/left == 1, step);
  }
  return step;
}

int64_t expected_kept_bytes(const ChainSize& chain, const ChainPolicy& policy) {
  const auto waiting = waiting_bytes(chain, policy);
  if (policy.shards == 1 || policy.keeps == Keeps::kNothing) return waiting;
  const bool keeps_part = policy.keeps == Keeps::kPart;
  if (!keeps_part && policy.shows == Shows::kShards) return waiting;
  return waiting + sum(chain.blocks, [&](const UnitSize& block) {
           return keeps_part ? gathered_row(block, policy.neighbours)
                             : policy.shards * gathered_row(block, policy.shards);
         });
}

int64_t expected_peak_bytes(const ChainSize& chain, const ChainPolicy& policy) {
  const auto kept = expected_kept_bytes(chain, policy);
  // One rank computes with its shards, and its gradients are final as they come.
  if (policy.shards == 1) return kept;
  const auto parameters = [&](const UnitSize& unit) {
    return policy.shards * gathered_row(unit, policy.shards);
  };
  const auto row = [&](const UnitSize& unit) { return reduced_row(unit, policy.shards); };
  const auto units = units_of(chain);
  const auto largest_row = largest(units, row);
  // The root's gradients and parameters stay until backward ends.
  auto bytes = policy.shards * row(chain.root);
  if (policy.shows == Shows::kCopies) bytes += parameters(chain.root);
  // The unit in turn, and the gather of the next one.
  if (policy.shows == Shows::kCopies || policy.keeps == Keeps::kPart)
    bytes += 2 * largest(units, parameters);
  // Gradients of the unit in turn; those of the one before on their way, and what comes.
  bytes += 2 * policy.shards * largest_row + largest_row;
  // A received row on its way to the replicas, and what comes from there.
  if (policy.replicas > 1) bytes += 2 * largest_row;
  // A unit that misses a gradient leaves when the second unit after it is touched.
  if (std::any_of(units.begin(), units.end(), has_unused)) bytes += policy.shards * largest_row;
  return bytes + kept;
}

}  // namespace fsdp::testing
