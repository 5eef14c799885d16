#include "dtensor/strategy/way.h"

namespace fsdp::internal {
namespace {

std::string joined(const std::vector<Placement>& placements) {
  std::string text;
  for (const Placement& placement : placements) {
    text += (text.empty() ? "" : ", ") + to_string(placement);
  }
  return text;
}

}  // namespace

Way replicated_way(size_t results, size_t operands) {
  return {.results = std::vector<Placement>(results, Replicate{}),
          .operands = std::vector<Placement>(operands, Replicate{})};
}

std::string to_string(const Way& way) {
  return joined(way.operands) + " -> " + joined(way.results);
}

}  // namespace fsdp::internal
