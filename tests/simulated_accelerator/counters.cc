#include "tests/simulated_accelerator/counters.h"

#include <algorithm>
#include <vector>

namespace fsdp::testing::simulated {

std::string places(const Tally& tally) {
  std::map<std::string, int64_t> counts;
  for (const auto& [what, count] : tally.by_place) {
    counts[what.first + " | " + to_string(what.second)] += count;
  }
  std::vector<std::pair<int64_t, std::string>> sorted;
  for (const auto& [text, count] : counts) sorted.emplace_back(count, text);
  std::sort(sorted.rbegin(), sorted.rend());
  std::string lines;
  for (const auto& [count, text] : sorted) lines += std::to_string(count) + " x " + text + "\n";
  return lines;
}

}  // namespace fsdp::testing::simulated
