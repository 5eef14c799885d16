#include "deferred_init/step_dependencies.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

namespace fsdp::internal {

void StepDependencies::add(std::vector<int64_t> reads, const std::vector<int64_t>& writes) {
  for (const auto value : writes) {
    const auto place = static_cast<size_t>(value);
    if (place >= writers_.size()) writers_.resize(place + 1);
    writers_[place].push_back(size());
  }
  reads_.push_back(std::move(reads));
}

std::vector<int64_t> StepDependencies::needed_for(const std::vector<int64_t>& values,
                                                  int64_t before) const {
  std::set<int64_t> needed;
  std::unordered_map<int64_t, int64_t> known;  // value: its writers before this step are needed
  std::vector<std::pair<int64_t, int64_t>> waiting;
  for (const auto value : values) waiting.emplace_back(value, before);
  while (!waiting.empty()) {
    const auto [value, end] = waiting.back();
    waiting.pop_back();
    if (static_cast<size_t>(value) >= writers_.size()) continue;
    auto& begin = known[value];
    const auto& writers = writers_[static_cast<size_t>(value)];
    for (auto writer = std::lower_bound(writers.begin(), writers.end(), begin);
         writer != writers.end() && *writer < end; ++writer) {
      if (!needed.insert(*writer).second) continue;
      for (const auto read : reads_[static_cast<size_t>(*writer)])
        waiting.emplace_back(read, *writer);
    }
    begin = std::max(begin, end);
  }
  return {needed.begin(), needed.end()};
}

}  // namespace fsdp::internal
