#include "dtensor/internal/dtensor_spec.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <utility>

namespace fsdp::internal {
namespace {

// Equal meshes of two ranks in one process (ranks as threads) or of two jobs after
// another have other groups: a spec is shared only where its collectives reach the same
// peers from the same place.
bool same_groups(const DeviceMesh& a, const DeviceMesh& b) {
  if (a.rank() != b.rank()) return false;
  for (int64_t m = 0; m < a.ndim(); ++m) {
    if (a.group(m).get() != b.group(m).get()) return false;
  }
  return true;
}

size_t hash_of(const DTensorSpec& spec) {
  size_t hash = spec.mesh.hash();
  const auto mix = [&hash](size_t value) { hash = hash * 1000003 ^ value; };
  for (const auto& placement : spec.placements) mix(placement.hash());
  for (int64_t size : spec.shape) mix(static_cast<size_t>(size));
  for (int64_t stride : spec.stride) mix(static_cast<size_t>(stride));
  return hash;
}

bool is_linear(Partial::Op op) { return op == Partial::Op::kSum || op == Partial::Op::kAvg; }

void check_partials_commute(const DTensorSpec& spec) {
  const Placement* first = nullptr;
  for (const auto& placement : spec.placements) {
    if (!placement.is_partial()) continue;
    if (first == nullptr) first = &placement;
    const bool commute = first->partial_op() == placement.partial_op() ||
                         (is_linear(first->partial_op()) && is_linear(placement.partial_op()));
    TORCH_CHECK_VALUE(commute, "placements: ", *first, " and ", placement,
                      " in one list do not commute; only sum and avg may mix (rank ",
                      spec.mesh.rank(), ")");
  }
}

// Whether a mesh dimension before `m` cuts the same tensor dimension.
bool is_cut_before(const DTensorSpec& spec, size_t m) {
  const int64_t dim = spec.placements[m].shard_dim();
  return std::any_of(spec.placements.begin(),
                     spec.placements.begin() + static_cast<std::ptrdiff_t>(m),
                     [dim](const auto& placement) { return placement.is_shard(dim); });
}

void check_interleaved(const DTensorSpec& spec, size_t m) {
  const auto [dim, outer, unit] = spec.placements[m].shard();
  const int64_t size = spec.shape[static_cast<size_t>(dim)];
  TORCH_CHECK_VALUE(outer >= 1 && unit >= 1, "placements: ", spec.placements[m],
                    ": outer and unit are at least 1, got ", outer, " and ", unit, " (rank ",
                    spec.mesh.rank(), ")");
  TORCH_CHECK_VALUE(size % (outer * unit) == 0, "placements: ", spec.placements[m],
                    ": outer * unit must divide dimension ", dim, " of ", size, " elements (rank ",
                    spec.mesh.rank(), ")");
  TORCH_CHECK_VALUE(!is_cut_before(spec, m) || !spec.placements[m].is_interleaved(),
                    "placements: ", spec.placements[m], " lies inside another cut of dimension ",
                    dim,
                    "; only the first mesh dimension that cuts one may have outer or unit "
                    "(rank ",
                    spec.mesh.rank(), ")");
}

void check_boxes(const DTensorSpec& spec) {
  for (const Placement& placement : spec.placements) {
    TORCH_CHECK_NOT_IMPLEMENTED(!placement.is_shard() || placement.shard().outer == 1, placement,
                                " leaves a rank no box of the tensor, which is needed here. Call "
                                ".redistribute() to a cut without outer first (collective; rank ",
                                spec.mesh.rank(), ")");
  }
}

void validate(const DTensorSpec& spec) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(spec.placements.size()) == spec.mesh.ndim(),
                    "placements: expected one per ", "mesh dimension, ", spec.mesh.ndim(), " for ",
                    spec.mesh, ", got ", spec.placements.size(), " (rank ", spec.mesh.rank(), ")");
  TORCH_CHECK_VALUE(spec.stride.size() == spec.shape.size(), "stride: expected ", spec.shape.size(),
                    " values, one per dimension of shape, got ", spec.stride.size(), " (rank ",
                    spec.mesh.rank(), ")");
  const auto ndim = static_cast<int64_t>(spec.shape.size());
  for (const auto& placement : spec.placements) {
    if (!placement.is_shard()) continue;
    TORCH_CHECK_VALUE(placement.shard_dim() >= 0 && placement.shard_dim() < ndim,
                      "placements: ", placement, " is out of range for a tensor of ", ndim,
                      " dimensions; allowed: Shard(0) to Shard(", ndim - 1, ") (rank ",
                      spec.mesh.rank(), ")");
  }
  check_partials_commute(spec);
  for (size_t m = 0; m < spec.placements.size(); ++m) {
    if (spec.placements[m].is_shard()) check_interleaved(spec, m);
  }
}

// Never destroyed: DTensors may outlive static destruction.
struct Interned {
  std::mutex mutex;
  std::unordered_multimap<size_t, std::weak_ptr<const DTensorSpec>> specs;
  size_t sweep_at = 1024;
};
Interned& interned() {
  static auto* const table = new Interned;
  return *table;
}

void sweep(Interned& table) {
  if (table.specs.size() < table.sweep_at) return;
  std::erase_if(table.specs, [](const auto& entry) { return entry.second.expired(); });
  table.sweep_at = std::max<size_t>(1024, 2 * table.specs.size());
}

}  // namespace

DTensorSpec DTensorSpec::with_placements(std::vector<Placement> placements) const {
  DTensorSpec spec = *this;
  spec.placements = std::move(placements);
  return spec;
}

DTensorSpec DTensorSpec::with_geometry(std::vector<int64_t> shape,
                                       std::vector<int64_t> stride) const {
  return {mesh, placements, std::move(shape), std::move(stride)};
}

DTensorSpec DTensorSpec::with_shape(std::vector<int64_t> shape) const {
  auto stride = contiguous_strides(shape);
  return with_geometry(std::move(shape), std::move(stride));
}

DTensorSpec DTensorSpec::without_partials() const {
  return with_placements(internal::without_partials(placements));
}

DTensorSpec DTensorSpec::replicated() const {
  return with_placements(std::vector<Placement>(placements.size(), Replicate{}));
}

bool DTensorSpec::has_partial() const {
  return std::any_of(placements.begin(), placements.end(),
                     [](const auto& placement) { return placement.is_partial(); });
}

bool DTensorSpec::is_cut(int64_t dim) const {
  for (size_t m = 0; m < placements.size(); ++m) {
    if (placements[m].is_shard(dim) && mesh.size(static_cast<int64_t>(m)) > 1) return true;
  }
  return false;
}

std::vector<Chunk> DTensorSpec::local_box() const {
  check_boxes(*this);
  return internal::local_box(shape, mesh.shape(), placements, mesh.coordinate());
}

std::vector<int64_t> DTensorSpec::local_shape() const {
  return internal::local_shape(shape, mesh.shape(), placements, mesh.coordinate());
}

std::vector<int64_t> shard_dims(const std::vector<Placement>& placements) {
  std::vector<int64_t> dims;
  dims.reserve(placements.size());
  for (const auto& placement : placements)
    dims.push_back(placement.is_shard() ? placement.shard_dim() : kNotSharded);
  return dims;
}

DTensorSpec simplified(DTensorSpec spec) {
  validate(spec);
  for (size_t m = 0; m < spec.placements.size(); ++m) {
    if (!spec.placements[m].is_interleaved()) continue;
    const Shard& cut = spec.placements[m].shard();
    const int64_t size = spec.shape[static_cast<size_t>(cut.dim)];
    spec.placements[m] = simplest(cut, size, spec.mesh.size(static_cast<int64_t>(m)));
  }
  return spec;
}

std::vector<Placement> without_partials(std::vector<Placement> placements) {
  for (auto& placement : placements) {
    if (placement.is_partial()) placement = Replicate{};
  }
  return placements;
}

DTensorSpecPtr intern_spec(DTensorSpec spec) {
  const size_t hash = hash_of(spec);
  Interned& table = interned();
  {
    std::lock_guard lock(table.mutex);
    const auto [begin, end] = table.specs.equal_range(hash);
    for (auto it = begin; it != end; ++it) {
      auto known = it->second.lock();
      if (known && *known == spec && same_groups(known->mesh, spec.mesh)) return known;
    }
  }
  validate(spec);
  auto fresh = std::make_shared<const DTensorSpec>(std::move(spec));
  std::lock_guard lock(table.mutex);
  sweep(table);
  table.specs.emplace(hash, fresh);
  return fresh;
}

std::string to_string(const DTensorSpec& spec) {
  std::ostringstream out;
  out << "shape [";
  for (size_t i = 0; i < spec.shape.size(); ++i) out << (i == 0 ? "" : ", ") << spec.shape[i];
  out << "] placed (";
  for (size_t i = 0; i < spec.placements.size(); ++i)
    out << (i == 0 ? "" : ", ") << spec.placements[i];
  out << ") on " << spec.mesh;
  return out.str();
}

}  // namespace fsdp::internal
