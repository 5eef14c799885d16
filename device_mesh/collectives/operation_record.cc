#include "device_mesh/collectives/operation_record.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

namespace fsdp::internal {
namespace {

using BySequence = std::map<uint32_t, const RecordedOperation*>;

// What is known of one lane, by rank.
using Lane = std::map<int64_t, BySequence>;

std::string told(const BySequence& operations, uint32_t sequence) {
  const auto found = operations.find(sequence);
  if (found == operations.end()) return "nothing";
  return found->second->what + " (" + std::to_string(found->second->bytes) + " bytes)";
}

bool are_alike(const Lane& lane, uint32_t sequence) {
  const auto first = told(lane.begin()->second, sequence);
  return std::all_of(lane.begin(), lane.end(),
                     [&](const auto& rank) { return told(rank.second, sequence) == first; });
}

// Records that begin later than others know nothing of what those begin with.
uint32_t first_known(const Lane& lane) {
  uint32_t first = 0;
  for (const auto& [rank, operations] : lane) {
    if (!operations.empty()) first = std::max(first, operations.begin()->first);
  }
  return first;
}

std::string difference_in(const Lane& lane) {
  std::set<uint32_t> sequences;
  for (const auto& [rank, operations] : lane) {
    for (const auto& [sequence, operation] : operations) sequences.insert(sequence);
  }
  for (auto at = sequences.lower_bound(first_known(lane)); at != sequences.end(); ++at) {
    if (are_alike(lane, *at)) continue;
    std::string text = "operation " + std::to_string(*at) + ":";
    for (const auto& [rank, operations] : lane)
      text += " rank " + std::to_string(rank) + " issued " + told(operations, *at) + ";";
    text.pop_back();
    return text;
  }
  return {};
}

}  // namespace

void OperationRecord::add(RecordedOperation operation) {
  if (ring_.size() < kCapacity) {
    ring_.push_back(std::move(operation));
    return;
  }
  ring_[next_] = std::move(operation);
  next_ = (next_ + 1) % kCapacity;
}

std::vector<RecordedOperation> OperationRecord::operations() const {
  auto operations = ring_;
  std::rotate(operations.begin(), operations.begin() + static_cast<std::ptrdiff_t>(next_),
              operations.end());
  return operations;
}

std::string to_text(const std::vector<RecordedOperation>& operations) {
  std::ostringstream text;
  for (const auto& each : operations)
    text << each.lane << ' ' << each.sequence << ' ' << static_cast<int>(each.kind) << ' '
         << each.bytes << ' ' << each.what << '\n';
  return text.str();
}

std::vector<RecordedOperation> parse_operations(const std::string& text) {
  std::vector<RecordedOperation> operations;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    RecordedOperation each;
    int kind = 0;
    if (!(fields >> each.lane >> each.sequence >> kind >> each.bytes) || fields.get() != ' ')
      continue;
    each.kind = static_cast<CollectiveKind>(kind);
    std::getline(fields, each.what);
    operations.push_back(std::move(each));
  }
  return operations;
}

std::string first_difference(
    const std::map<int64_t, std::vector<RecordedOperation>>& operations_by_rank) {
  std::map<uint32_t, Lane> lanes;
  for (const auto& [rank, operations] : operations_by_rank) {
    for (const auto& each : operations) lanes[each.lane][rank][each.sequence] = &each;
  }
  std::string text;
  for (auto& [number, lane] : lanes) {
    for (const auto& [rank, operations] : operations_by_rank) lane[rank];
    const auto difference = difference_in(lane);
    if (!difference.empty()) text += (text.empty() ? "" : "; and at ") + difference;
  }
  return text;
}

}  // namespace fsdp::internal
