#include "dtensor/placement.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>

namespace fsdp {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // of one coordinate: sums stay integers

bool are_in_range(const std::vector<int64_t>& units) {
  return std::all_of(units.begin(), units.end(),
                     [](int64_t each) { return each >= 0 && each <= kMost; });
}

std::vector<int64_t> in_lowest_terms(std::vector<int64_t> units) {
  if (!are_in_range(units)) return units;
  const int64_t divisor = std::accumulate(units.begin(), units.end(), int64_t{0},
                                          [](int64_t a, int64_t b) { return std::gcd(a, b); });
  for (int64_t& each : units) each /= std::max<int64_t>(divisor, 1);
  return units;
}

// Never destroyed: placements may outlive static destruction.
const std::vector<int64_t>* record_of(std::vector<int64_t> units) {
  static auto* const records = new std::set<std::vector<int64_t>>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  return &*records->insert(std::move(units)).first;
}

const char* name_of(Partial::Op op) {
  switch (op) {
    case Partial::Op::kSum:
      return "sum";
    case Partial::Op::kAvg:
      return "avg";
    case Partial::Op::kMin:
      return "min";
    case Partial::Op::kMax:
      return "max";
    case Partial::Op::kProduct:
      return "product";
  }
  return "unknown";
}

std::string text_of_ragged(const Shard& cut) {
  const std::string dim = std::to_string(cut.dim);
  if (cut.local_units == LocalUnits::of_owner(Owned::kPlanned)) return "Owned()";
  if (const auto owner = cut.local_units.owner())
    return "Owned(" + std::to_string(*owner) + (cut.dim == 0 ? "" : ", dim=" + dim) + ")";
  return "RaggedShard(" + dim + ", local_units=" + cut.local_units.to_string() + ")";
}

}  // namespace

LocalUnits::LocalUnits(const std::vector<int64_t>& units)
    : units_(record_of(in_lowest_terms(units))) {}

LocalUnits LocalUnits::of_owner(int64_t coordinate) {
  if (coordinate < 0) return LocalUnits({coordinate});  // which cannot cut
  std::vector<int64_t> units(static_cast<size_t>(coordinate) + 1, 0);
  units.back() = 1;
  return LocalUnits(units);
}

bool LocalUnits::can_cut() const { return are_in_range(*units_) && total() > 0; }

int64_t LocalUnits::at(int64_t coordinate) const {
  return coordinate < coordinates() ? (*units_)[static_cast<size_t>(coordinate)] : 0;
}

int64_t LocalUnits::before(int64_t coordinate) const {
  const auto end = units_->begin() + std::min(coordinate, coordinates());
  return std::accumulate(units_->begin(), end, int64_t{0});
}

int64_t LocalUnits::total() const { return before(coordinates()); }
int64_t LocalUnits::most() const { return *std::max_element(units_->begin(), units_->end()); }

std::optional<int64_t> LocalUnits::owner() const {
  const bool is_only = !units_->empty() && std::all_of(units_->begin(), units_->end() - 1,
                                                       [](int64_t each) { return each == 0; });
  return is_only && units_->back() == 1 ? std::optional(coordinates() - 1) : std::nullopt;
}

std::string LocalUnits::to_string() const {
  std::string text = "[";
  for (const int64_t each : *units_) text += (text.size() == 1 ? "" : ", ") + std::to_string(each);
  return text + "]";
}

size_t LocalUnits::hash() const {
  size_t hash = 0;
  if (has_value())
    for (const int64_t each : *units_) hash = hash * 1000003 ^ static_cast<size_t>(each + 1);
  return hash;
}

size_t Placement::hash() const {
  if (is_shard()) {
    const auto& [dim, outer, unit, local_units] = shard();
    return 31 + 7 * static_cast<size_t>(dim + 1009 * (outer - 1) + 9176423 * (unit - 1)) +
           1000003 * local_units.hash();
  }
  if (is_partial()) return 2 + 7 * static_cast<size_t>(partial_op());
  return 1;
}

Placement Placement::along(int64_t dim) const {
  Shard cut = shard();
  cut.dim = dim;
  return cut;
}

std::string to_string(const Placement& placement) {
  if (placement.is_ragged()) return text_of_ragged(placement.shard());
  if (placement.is_shard()) {
    const auto& [dim, outer, unit, local_units] = placement.shard();
    return "Shard(" + std::to_string(dim) +
           (outer > 1 ? ", outer=" + std::to_string(outer) : std::string()) +
           (unit > 1 ? ", unit=" + std::to_string(unit) : std::string()) + ")";
  }
  if (placement.is_partial())
    return std::string("Partial(") + name_of(placement.partial_op()) + ")";
  return "Replicate()";
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  return out << to_string(placement);
}

}  // namespace fsdp
