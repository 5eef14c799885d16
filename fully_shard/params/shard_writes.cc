#include "fully_shard/params/shard_writes.h"

#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>

namespace fsdp::internal {
namespace {

Holders bit_of(size_t rank) { return Holders{1} << (rank % 32); }

template <class LengthOf>
Holders holders_among(int64_t ranks, const LengthOf& length_of) {
  Holders with = 0, without = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto bit = bit_of(static_cast<size_t>(rank));
    (length_of(rank) > 0 ? with : without) |= bit;
  }
  return with & ~without;
}

bool has(const std::vector<uint64_t>& words, uint64_t word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

}  // namespace

void ShardWrites::shard_written() {
  if (is_dirty())
    throw std::logic_error("a shard is written before the dirty copy was written back");
  ++generation_;
}

void ShardWrites::copy_filled() {
  if (is_dirty()) throw std::logic_error("a dirty copy is filled");
  copy_ = generation_;
}

void ShardWrites::copy_emptied() {
  if (is_dirty()) throw std::logic_error("a dirty copy is emptied");
  copy_.reset();
}

void ShardWrites::copy_discarded() {
  dirty_.clear();
  copy_.reset();
}

std::vector<size_t> ShardWrites::write_back() {
  const std::vector<size_t> written(dirty_.begin(), dirty_.end());
  dirty_.clear();
  ++generation_;
  return written;
}

Holders holders_of(const PackedChunk& chunk, const ShardGrid& grid) {
  return holders_among(grid.inner_ranks, [&](int64_t rank) {
    return chunk.length(grid.place_of(rank, grid.outer_rank));
  });
}

Holders holders_of_pieces(const PackedChunk& chunk, const ShardGrid& grid) {
  return holders_among(grid.outer_ranks, [&](int64_t rank) {
    return chunk.length(grid.place_of(grid.inner_rank, rank));
  });
}

bool WriteRuns::compared(const std::vector<Holders>& all) {
  const bool any = std::any_of(all.begin(), all.end(), [](Holders each) { return each != 0; });
  if (any) ++ended_;
  writing_ = 0;
  return any;
}

std::optional<int64_t> WriteRuns::silent_rank(const std::vector<Holders>& all) {
  Holders holders = 0;
  for (const auto each : all) holders |= each;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if ((holders & bit_of(rank)) != 0 && all[rank] == 0) return static_cast<int64_t>(rank);
  }
  return std::nullopt;
}

std::string WriteRuns::describe(const std::vector<Holders>& all,
                                const std::vector<int64_t>& ranks) const {
  std::map<uint64_t, std::vector<int64_t>, std::greater<>> by_runs;
  for (size_t i = 0; i < all.size(); ++i)
    by_runs[ended_ + (all[i] != 0 ? 1 : 0)].push_back(ranks[i]);
  std::string text;
  for (const auto& [runs, writers] : by_runs) {
    text += (text.empty() ? "" : "; ") + std::to_string(runs) + (runs == 1 ? " time" : " times") +
            (writers.size() == 1 ? " on rank" : " on ranks");
    for (const auto rank : writers)
      text += (rank == writers.front() ? " " : ", ") + std::to_string(rank);
  }
  return text;
}

bool ReplicaWrites::agree(const std::vector<uint64_t>& all) {
  return !has(all, kWrote) || !has(all, kDidNot);
}

void ReplicaWrites::compared(const std::vector<uint64_t>& all) {
  if (has(all, kUnknown)) return;
  wrote_ = used_ = false;
}

}  // namespace fsdp::internal
