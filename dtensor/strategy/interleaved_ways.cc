#include "dtensor/strategy/interleaved_ways.h"

#include <algorithm>
#include <optional>

namespace fsdp::internal {
namespace {

// The length of every dimension that the way cuts; none where they differ.
std::optional<int64_t> cut_length(const Way& way, const CallGeometry& call) {
  std::optional<int64_t> length;
  for (size_t i = 0; i < way.operands.size(); ++i) {
    if (!way.operands[i].is_shard()) continue;
    const int64_t size = call.operands[i].size(way.operands[i].shard_dim());
    if (length.has_value() && *length != size) return std::nullopt;
    length = size;
  }
  return length;
}

void cut_alike(std::vector<Placement>& placements, const Shard& cut) {
  for (Placement& placement : placements) {
    if (placement.is_shard()) placement = Placement(cut).along(placement.shard_dim());
  }
}

bool lets_stay(const Way& way, const std::vector<Placement>& arriving) {
  for (size_t i = 0; i < arriving.size(); ++i) {
    if (arriving[i].is_interleaved() && way.operands[i] == arriving[i]) return true;
  }
  return false;
}

bool is_interleaved(const Way& way) {
  const auto interleaved = [](const Placement& placement) { return placement.is_interleaved(); };
  return std::any_of(way.operands.begin(), way.operands.end(), interleaved) ||
         std::any_of(way.results.begin(), way.results.end(), interleaved);
}

std::optional<Way> cut_as(Way way, const Shard& cut, const CallGeometry& call) {
  if (is_interleaved(way)) return std::nullopt;
  const auto length = cut_length(way, call);
  if (!length.has_value() || *length % (cut.outer * cut.unit) != 0) return std::nullopt;
  cut_alike(way.operands, cut);
  cut_alike(way.results, cut);
  if (!lets_stay(way, call.arriving)) return std::nullopt;
  return way;
}

}  // namespace

std::vector<Way> with_interleaved_ways(std::vector<Way> ways, const CallGeometry& call) {
  const size_t plain = ways.size();
  for (const Placement& placement : call.arriving) {
    if (!placement.is_interleaved()) continue;
    for (size_t i = 0; i < plain; ++i) {
      const auto way = cut_as(ways[i], placement.shard(), call);
      if (way.has_value() && std::find(ways.begin(), ways.end(), *way) == ways.end())
        ways.push_back(*way);
    }
  }
  return ways;
}

}  // namespace fsdp::internal
