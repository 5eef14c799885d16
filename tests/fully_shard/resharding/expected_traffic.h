// What a training step of a chain of units sends and holds, derived from what the
// policies promise: sizes in, counts and bytes out. Pure integers; nothing of the runtime
// is asked.
//
//   const ChainPolicy policy{.shards = 4, .keeps = Keeps::kNothing};
//   EXPECT_EQ(sent, expected_traffic(chain, policy));
//   EXPECT_LE(counters(mesh).peak_bytes, expected_peak_bytes(chain, policy));
//
// It holds for steps that repeat: what is known of the units' order is known by then.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace fsdp::testing {

// Over two micro-batches: nothing is reduced in the first one, or nothing over replicas.
enum class Accumulation { kOff, kNoSync, kShardsOnly };
constexpr Accumulation kAllAccumulations[] = {Accumulation::kOff, Accumulation::kNoSync,
                                              Accumulation::kShardsOnly};
int64_t micro_batches(Accumulation accumulation);

// Of doubles.
struct ParameterSize {
  int64_t rows = 0, columns = 0;
  bool is_trainable = true;
  bool is_used = true;
};
using UnitSize = std::vector<ParameterSize>;

// The model computes with the root first and last, and with each block once in between.
struct ChainSize {
  UnitSize root;  // with the default policy: it stays from its first use to its last
  std::vector<UnitSize> blocks;
};

// What blocks leave between forward and backward.
enum class Keeps { kNothing, kAll, kPart };

// How parameters are there while they are used: in memory of their own, or, as in peer
// memory, where the shards lie. What neighbours keep a part of is copied in backward.
enum class Shows { kCopies, kShards };

// REQUIRES: replicas == 1, or shards > 1.
struct ChainPolicy {
  int64_t shards = 1, replicas = 1;
  Keeps keeps = Keeps::kNothing;
  int64_t neighbours = 1;  // of kPart: the ranks that keep a part each
  Accumulation accumulation = Accumulation::kOff;
  Shows shows = Shows::kCopies;
};

// As the counters of the same names.
struct StepTraffic {
  int64_t all_gathers = 0, prefetched_all_gathers = 0, all_gather_bytes = 0;
  int64_t reduce_scatters = 0, reduce_scatter_bytes = 0;
  int64_t all_reduces = 0;
  bool operator==(const StepTraffic&) const = default;
};
std::ostream& operator<<(std::ostream& out, const StepTraffic& traffic);

StepTraffic expected_traffic(const ChainSize& chain, const ChainPolicy& policy);

// What a program asks to keep, on rank 0: it grows with depth.
int64_t expected_kept_bytes(const ChainSize& chain, const ChainPolicy& policy);
// The memory formula, without the shards and their gradients: what is kept, and what does
// not depend on depth.
int64_t expected_peak_bytes(const ChainSize& chain, const ChainPolicy& policy);

}  // namespace fsdp::testing
