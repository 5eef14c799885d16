#include "dtensor/layout/tensor_layout.h"

#include "dtensor/layout/shard_layout.h"

#include <algorithm>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace fsdp::internal {
namespace {

using Facts = TensorLayout::Facts;

size_t hash_of(const Facts& facts) {
  size_t hash = facts.placements.size();
  const auto mix = [&hash](size_t value) { hash = hash * 1000003 ^ value; };
  for (const auto& placement : facts.placements) mix(placement.hash());
  for (const auto* const numbers : {&facts.mesh_shape, &facts.shape, &facts.stride}) {
    for (const int64_t number : *numbers) mix(static_cast<size_t>(number));
  }
  return hash;
}

template <class... Parts>
void check(bool fits, const Parts&... parts) {
  if (fits) return;
  std::ostringstream reason;
  (reason << ... << parts);
  throw std::invalid_argument(reason.str());
}

bool is_linear(Partial::Op op) { return op == Partial::Op::kSum || op == Partial::Op::kAvg; }

void check_partials_commute(const Facts& facts) {
  const Placement* first = nullptr;
  for (const auto& placement : facts.placements) {
    if (!placement.is_partial()) continue;
    if (first == nullptr) first = &placement;
    const bool commute = first->partial_op() == placement.partial_op() ||
                         (is_linear(first->partial_op()) && is_linear(placement.partial_op()));
    check(commute, "placements: ", *first, " and ", placement,
          " in one list do not commute; only sum and avg may mix");
  }
}

// Whether a mesh dimension before `m` cuts the same tensor dimension.
bool is_cut_before(const Facts& facts, size_t m) {
  const int64_t dim = facts.placements[m].shard_dim();
  return std::any_of(facts.placements.begin(),
                     facts.placements.begin() + static_cast<std::ptrdiff_t>(m),
                     [dim](const auto& placement) { return placement.is_shard(dim); });
}

std::string expected_of(const Shard& cut, int64_t ranks) {
  if (!cut.local_units.has_value())
    return "outer and unit are at least 1, got " + std::to_string(cut.outer) + " and " +
           std::to_string(cut.unit);
  return "expected local_units of 0 or more, not all 0, one per coordinate of a mesh dimension "
         "of " +
         std::to_string(ranks) + ", or an owner among these, and neither outer nor unit";
}

void check_interleaved(const Facts& facts, size_t m) {
  const Placement& placement = facts.placements[m];
  const Shard& cut = placement.shard();
  const int64_t dim = cut.dim, size = facts.shape[static_cast<size_t>(dim)];
  check(is_well_formed(cut, facts.mesh_shape[m]), "placements: ", placement, ": ",
        expected_of(cut, facts.mesh_shape[m]));
  check(divides(cut, size), "placements: ", placement, ": ",
        placement.is_ragged() ? "the sum of local_units" : "outer * unit",
        " must divide dimension ", dim, " of ", size, " elements");
  check(!is_cut_before(facts, m) || placement.can_lie_inside_a_cut(), "placements: ", placement,
        " lies inside another cut of dimension ", dim,
        "; only the first mesh dimension that cuts one may have outer, unit or units of several "
        "coordinates");
}

void validate(const Facts& facts) {
  check(facts.placements.size() == facts.mesh_shape.size(),
        "placements: expected one per mesh dimension, ", facts.mesh_shape.size(), ", got ",
        facts.placements.size());
  check(facts.stride.size() == facts.shape.size(), "stride: expected ", facts.shape.size(),
        " values, one per dimension of shape, got ", facts.stride.size());
  const auto ndim = static_cast<int64_t>(facts.shape.size());
  for (const auto& placement : facts.placements) {
    if (!placement.is_shard()) continue;
    check(ndim > 0, "placements: ", placement,
          " is out of range for a tensor of 0 dimensions; allowed: Replicate() and Partial()");
    check(placement.shard_dim() >= 0 && placement.shard_dim() < ndim, "placements: ", placement,
          " is out of range for a tensor of ", ndim, " dimensions; allowed: Shard(0) to Shard(",
          ndim - 1, ")");
  }
  check_partials_commute(facts);
  for (size_t m = 0; m < facts.placements.size(); ++m) {
    if (facts.placements[m].is_shard()) check_interleaved(facts, m);
  }
}

// The records that somebody holds. Never destroyed: tensors may outlive static
// destruction.
class Records {
 public:
  static Records& instance() {
    static auto* const records = new Records;
    return *records;
  }

  // Null when nobody holds an equal one.
  std::shared_ptr<const Facts> find(const Facts& facts, size_t hash) {
    const std::lock_guard lock(mutex_);
    return known(facts, hash);
  }

  // The first one, where two threads add equal ones.
  std::shared_ptr<const Facts> add(Facts facts, size_t hash) {
    const std::lock_guard lock(mutex_);
    if (auto first = known(facts, hash)) return first;
    sweep();
    auto fresh = std::make_shared<const Facts>(std::move(facts));
    records_.emplace(hash, fresh);
    return fresh;
  }

 private:
  std::shared_ptr<const Facts> known(const Facts& facts, size_t hash) {
    const auto [begin, end] = records_.equal_range(hash);
    for (auto it = begin; it != end; ++it) {
      auto held = it->second.lock();
      if (held && *held == facts) return held;
    }
    return nullptr;
  }

  void sweep() {
    if (records_.size() < sweep_at_) return;
    std::erase_if(records_, [](const auto& entry) { return entry.second.expired(); });
    sweep_at_ = std::max<size_t>(1024, 2 * records_.size());
  }

  std::mutex mutex_;
  std::unordered_multimap<size_t, std::weak_ptr<const Facts>> records_;
  size_t sweep_at_ = 1024;
};

}  // namespace

TensorLayout::TensorLayout(Facts facts) {
  const size_t hash = hash_of(facts);
  facts_ = Records::instance().find(facts, hash);
  if (facts_ != nullptr) return;
  validate(facts);
  facts_ = Records::instance().add(std::move(facts), hash);
}

bool TensorLayout::has_partial() const {
  return std::any_of(placements().begin(), placements().end(),
                     [](const auto& placement) { return placement.is_partial(); });
}

bool TensorLayout::has_shard() const {
  return std::any_of(placements().begin(), placements().end(),
                     [](const auto& placement) { return placement.is_shard(); });
}

bool TensorLayout::is_cut(int64_t dim) const {
  for (size_t m = 0; m < placements().size(); ++m) {
    if (placements()[m].is_shard(dim) && mesh_shape()[m] > 1) return true;
  }
  return false;
}

std::vector<LocalBox> TensorLayout::local_boxes(const std::vector<int64_t>& coordinate) const {
  return internal::local_boxes(shape(), mesh_shape(), placements(), coordinate);
}

std::vector<int64_t> TensorLayout::local_shape(const std::vector<int64_t>& coordinate) const {
  return internal::local_shape(shape(), mesh_shape(), placements(), coordinate);
}

std::string to_string(const TensorLayout& layout) {
  std::ostringstream out;
  out << "shape [";
  const char* separator = "";
  for (const int64_t size : layout.shape()) out << std::exchange(separator, ", ") << size;
  out << "] placed (";
  separator = "";
  for (const auto& placement : layout.placements())
    out << std::exchange(separator, ", ") << placement;
  out << ")";
  return out.str();
}

}  // namespace fsdp::internal
