#include "device_mesh/device_mesh.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/internal/accelerator.h"
#include "device_mesh/internal/mesh_layout.h"
#include "device_mesh/process_group.h"
#include "device_mesh/process_groups/dimension_groups.h"
#include "device_mesh/process_groups/process_group_factory.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

namespace fsdp {
namespace {

using internal::DimensionGroups;
using internal::MeshLayout;
using Indices = std::vector<int64_t>;
using Names = std::vector<std::string>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// What a mesh and all meshes cut from it share: the ranks it was made of, and the groups
// made for dimensions that were flattened or cut into blocks.
struct Family {
  Indices ranks;                           // global, by position in the layout
  std::shared_ptr<DimensionGroups> world;  // null where there was no default group
  std::mutex mutex;
  std::map<Indices, std::shared_ptr<DimensionGroups>> made;  // by global ranks
};

std::string join(const Names& names, const char* separator) {
  std::ostringstream text;
  for (size_t i = 0; i < names.size(); ++i) text << (i ? separator : "") << names[i];
  return text.str();
}

void check_device_type(const Group& group, c10::DeviceType device_type, int64_t rank) {
  TORCH_CHECK_VALUE(device_type == c10::kCPU || at::accelerator::isAccelerator(device_type),
                    "DeviceMesh: device_type ", device_type,
                    ": allowed are cpu and accelerators, such as cuda (rank ", rank, ")");
  TORCH_CHECK_VALUE(internal::serves(group, device_type) || group->getDeviceTypes().empty(),
                    "DeviceMesh: device_type ", device_type, ", but the process group's backend '",
                    internal::group_backend(group), "' does not serve it (rank ", rank, ")");
}

void check_shape(const Indices& shape, int64_t size, const char* size_is, int64_t rank) {
  TORCH_CHECK_VALUE(!shape.empty(), "DeviceMesh: shape is empty (rank ", rank, ")");
  int64_t product = 1;
  for (const int64_t extent : shape) {
    TORCH_CHECK_VALUE(extent >= 1, "DeviceMesh: shape ", c10::IntArrayRef(shape),
                      ": every dimension must be at least 1 (rank ", rank, ")");
    product *= extent;
  }
  TORCH_CHECK_VALUE(product == size, "DeviceMesh: shape ", c10::IntArrayRef(shape), " has ",
                    product, " places, expected ", size, " (", size_is, ") (rank ", rank, ")");
}

void check_names(const Names& names, size_t ndim, int64_t rank) {
  if (names.empty()) return;
  TORCH_CHECK_VALUE(names.size() == ndim, "DeviceMesh: dim_names (", join(names, ", "),
                    "): expected ", ndim, " names or none (rank ", rank, ")");
  std::set<std::string> seen;
  for (const auto& name : names) {
    TORCH_CHECK_VALUE(!name.empty() && seen.insert(name).second, "DeviceMesh: dim_names (",
                      join(names, ", "), "): '", name, "' is empty or not unique (rank ", rank,
                      ")");
  }
}

}  // namespace

struct DeviceMesh::State {
  c10::Device device = c10::kCPU;  // of this rank
  MeshLayout layout = MeshLayout::row_major({});
  Names dim_names;
  Indices coordinate;
  std::vector<std::shared_ptr<DimensionGroups>> dims;
  std::shared_ptr<Family> family;
  Indices ranks;
  int64_t rank = 0;
  std::string text;  // of to_string(): announcements of every redistribution have it

  // Fills in what follows from the other members.
  std::shared_ptr<const State> complete() && {
    ranks = layout.positions();
    for (int64_t& rank : ranks) rank = family->ranks[static_cast<size_t>(rank)];
    rank = family->ranks[static_cast<size_t>(layout.position_of(coordinate))];
    for (int64_t dim = 0; dim < layout.ndim(); ++dim)
      internal::note_ranks_in_job(dims[static_cast<size_t>(dim)]->group(), ranks_along(dim));
    text = described();
    return std::make_shared<const State>(std::move(*this));
  }

  std::string described() const {
    std::ostringstream out;
    out << "DeviceMesh((";
    for (size_t dim = 0; dim < layout.sizes().size(); ++dim) {
      if (dim > 0) out << ", ";
      if (!dim_names.empty()) out << dim_names[dim] << "=";
      out << layout.sizes()[dim];
    }
    out << "), '" << c10::DeviceTypeName(device.type(), /*lower_case=*/true)
        << "', stride=" << layout.strides_text() << ")";
    return out.str();
  }

  // The mesh of these dimensions, in that order, through this rank.
  std::shared_ptr<const State> along(const Indices& dims_taken) const {
    State slice;
    slice.device = device;
    slice.layout = layout.along(dims_taken, coordinate);
    slice.family = family;
    for (const int64_t dim : dims_taken) {
      const auto place = static_cast<size_t>(dim);
      slice.coordinate.push_back(coordinate[place]);
      slice.dims.push_back(dims[place]);
      if (!dim_names.empty()) slice.dim_names.push_back(dim_names[place]);
    }
    return std::move(slice).complete();
  }

  // This rank's row, in the order of the group's ranks.
  Indices ranks_along(int64_t dim) const {
    const auto row = MeshLayout::row_major(layout.sizes()).along({dim}, coordinate);
    Indices row_ranks;
    for (const int64_t place : row.positions())
      row_ranks.push_back(ranks[static_cast<size_t>(place)]);
    return row_ranks;
  }

  size_t index_of(int64_t dim) const {
    const int64_t ndim = layout.ndim();
    TORCH_CHECK_INDEX(dim >= -ndim && dim < ndim, "DeviceMesh: dimension ", dim, ": expected ",
                      -ndim, " to ", ndim - 1, " (rank ", rank, ")");
    return static_cast<size_t>(dim < 0 ? dim + ndim : dim);
  }

  Indices indices_of(const Names& names) const {
    TORCH_CHECK_VALUE(!names.empty(), "DeviceMesh: no dimension named (rank ", rank, ")");
    Indices dims_named;
    for (const auto& name : names) {
      const auto found = std::find(dim_names.begin(), dim_names.end(), name);
      TORCH_CHECK_VALUE(
          found != dim_names.end(), "DeviceMesh: dimension '", name, "' is unknown; this mesh has ",
          dim_names.empty() ? "no dimension names" : "(" + join(dim_names, ", ") + ")", " (rank ",
          rank, ")");
      const int64_t dim = found - dim_names.begin();
      TORCH_CHECK_VALUE(std::find(dims_named.begin(), dims_named.end(), dim) == dims_named.end(),
                        "DeviceMesh: dimension '", name, "' is named twice (rank ", rank, ")");
      dims_named.push_back(dim);
    }
    return dims_named;
  }

  // The groups of the dimension that `dims_named` merge into. Collective over its ranks
  // the first time.
  std::shared_ptr<DimensionGroups> merged_groups(const Indices& dims_named,
                                                 const std::string& name) const {
    if (dims_named.size() == 1) return dims[static_cast<size_t>(dims_named.front())];
    return groups_of(layout.merged(dims_named)
                         .along({layout.merged_position(dims_named)}, merged_coordinate(dims_named))
                         .positions(),
                     dims_named, "flatten to '" + name + "'", "mesh_" + name);
  }

  // The groups of the ranks at `members`, which lie along dimensions `along`. Collective
  // over the ranks of these the first time.
  std::shared_ptr<DimensionGroups> groups_of(Indices members, const Indices& along,
                                             const std::string& caller,
                                             const std::string& name) const {
    for (int64_t& member : members) member = family->ranks[static_cast<size_t>(member)];
    const auto& world = family->world;
    const int64_t last = *std::max_element(members.begin(), members.end());
    TORCH_CHECK_VALUE(
        world && last < world->group()->getSize() && world->group()->getRank() == rank,
        "DeviceMesh: ", caller,
        " needs a default process group that contains the mesh's ranks (rank ", rank, ")");
    const std::lock_guard<std::mutex> lock(family->mutex);
    auto& groups = family->made[members];
    if (!groups) groups = make_groups(members, along, caller, name);
    return groups;
  }

  std::shared_ptr<DimensionGroups> make_groups(const Indices& members, const Indices& along,
                                               const std::string& caller,
                                               const std::string& name) const {
    const auto& world = family->world;
    if (members == internal::global_ranks(world->group())) return world;
    const auto meet = [&](const std::string& what) {
      for (const int64_t dim : along) dims[static_cast<size_t>(dim)]->announce(what);
    };
    meet(caller);
    auto made = world->make_subset(members, name);
    // Nobody goes on, or ends and takes the store along, while others still connect.
    meet("end of " + caller);
    return made;
  }

  Indices merged_coordinate(const Indices& dims_named) const {
    return *layout.merged(dims_named).coordinate_of(layout.position_of(coordinate));
  }
};

DeviceMesh::DeviceMesh(std::shared_ptr<const State> state) : state_(std::move(state)) {}

DeviceMesh DeviceMesh::from_group(Group group, c10::DeviceType device_type, Indices ranks,
                                  std::string dim_name) {
  TORCH_CHECK_VALUE(group, "DeviceMesh::from_group: group is null");
  if (ranks.empty()) ranks = internal::global_ranks(group);
  const int64_t size = group->getSize();
  return from_groups({std::move(group)}, device_type, std::move(ranks), {size},
                     dim_name.empty() ? Names{} : Names{std::move(dim_name)});
}

DeviceMesh DeviceMesh::from_groups(std::vector<Group> groups, c10::DeviceType device_type,
                                   Indices ranks, Indices shape, Names dim_names) {
  TORCH_CHECK_VALUE(!groups.empty() && groups.size() == shape.size(),
                    "DeviceMesh::from_groups: ", groups.size(), " groups for shape ",
                    c10::IntArrayRef(shape), ": expected one group per dimension");
  State state;
  state.layout = MeshLayout::row_major(shape);
  const auto world = internal::default_dimension();
  for (size_t d = 0; d < groups.size(); ++d) {
    TORCH_CHECK_VALUE(groups[d], "DeviceMesh::from_groups: the group of dimension ", d, " is null");
    const int64_t local_rank = groups[d]->getRank();
    TORCH_CHECK_VALUE(groups[d]->getSize() == shape[d],
                      "DeviceMesh::from_groups: the group of dimension ", d, " has ",
                      groups[d]->getSize(), " ranks, expected ", shape[d], " as in shape ",
                      c10::IntArrayRef(shape), " (rank ", local_rank, " of that group)");
    check_device_type(groups[d], device_type, local_rank);
    state.coordinate.push_back(local_rank);
    const bool is_world = world && world->group() == groups[d];
    state.dims.push_back(is_world ? world : std::make_shared<DimensionGroups>(groups[d]));
  }
  check_shape(shape, static_cast<int64_t>(ranks.size()), "the number of ranks given",
              state.coordinate.front());
  const int64_t rank = ranks[static_cast<size_t>(state.layout.position_of(state.coordinate))];
  TORCH_CHECK_VALUE(std::set<int64_t>(ranks.begin(), ranks.end()).size() == ranks.size(),
                    "DeviceMesh::from_groups: ranks ", c10::IntArrayRef(ranks),
                    " are not unique (rank ", rank, ")");
  check_names(dim_names, shape.size(), rank);
  state.device = internal::current_device(device_type);
  state.dim_names = std::move(dim_names);
  state.family = std::make_shared<Family>();
  state.family->ranks = std::move(ranks);
  state.family->world = world;
  return DeviceMesh(std::move(state).complete());
}

c10::DeviceType DeviceMesh::device_type() const { return state_->device.type(); }
int64_t DeviceMesh::ndim() const { return state_->layout.ndim(); }
int64_t DeviceMesh::size() const { return state_->layout.size(); }
int64_t DeviceMesh::size(int64_t dim) const { return shape()[state_->index_of(dim)]; }
const Indices& DeviceMesh::shape() const { return state_->layout.sizes(); }
const Names& DeviceMesh::dim_names() const { return state_->dim_names; }
const Indices& DeviceMesh::ranks() const { return state_->ranks; }
int64_t DeviceMesh::rank() const { return state_->rank; }
int64_t DeviceMesh::local_rank(int64_t dim) const {
  return state_->coordinate[state_->index_of(dim)];
}
const Indices& DeviceMesh::coordinate() const { return state_->coordinate; }
const Group& DeviceMesh::group(int64_t dim) const {
  return state_->dims[state_->index_of(dim)]->group();
}
int64_t DeviceMesh::slice_index() const { return state_->layout.slice_index(); }

Group DeviceMesh::side_group(int64_t dim, const std::string& purpose) const {
  return state_->dims[state_->index_of(dim)]->side_group(purpose);
}

DeviceMesh DeviceMesh::operator[](const std::string& dim_name) const {
  return (*this)[Names{dim_name}];
}

DeviceMesh DeviceMesh::operator[](const Names& dim_names) const {
  return DeviceMesh(state_->along(state_->indices_of(dim_names)));
}

DeviceMesh DeviceMesh::permute(const Indices& dims) const {
  Indices sorted = dims, all(static_cast<size_t>(ndim()));
  std::sort(sorted.begin(), sorted.end());
  std::iota(all.begin(), all.end(), int64_t{0});
  TORCH_CHECK_VALUE(sorted == all, "DeviceMesh::permute: dims is ", c10::IntArrayRef(dims),
                    ", expected each dimension of ", to_string(*this), " once (rank ", rank(), ")");
  return DeviceMesh(state_->along(dims));
}

DeviceMesh DeviceMesh::beside(const DeviceMesh& inner) const {
  const bool related = state_->family == inner.state_->family;
  auto layout =
      related ? state_->layout.beside(inner.state_->layout, inner.coordinate()) : std::nullopt;
  TORCH_CHECK_VALUE(layout, to_string(*this), " and ", to_string(inner),
                    " are not different dimensions of one mesh: slice both from the one that "
                    "init_device_mesh returned (rank ",
                    rank(), ")");
  State both = *state_;
  both.layout = std::move(*layout);
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(both.coordinate, inner.coordinate());
  append(both.dims, inner.state_->dims);
  append(both.dim_names, inner.dim_names());
  check_names(both.dim_names, both.dims.size(), rank());
  return DeviceMesh(std::move(both).complete());
}

bool covers(const DeviceMesh& mesh, const DeviceMesh& part, int64_t dim) {
  for (int64_t own = 0; own < mesh.ndim(); ++own)
    if (mesh.group(own) == part.group(dim)) return true;
  if (mesh.state_->family != part.state_->family) return false;
  const auto positions = part.state_->layout.along({dim}, part.coordinate()).positions();
  return std::all_of(positions.begin(), positions.end(), [&](int64_t position) {
    return mesh.state_->layout.coordinate_of(position).has_value();
  });
}

DeviceMesh DeviceMesh::flatten(const Names& dim_names, std::string name) const {
  const Indices dims = state_->indices_of(dim_names);
  if (name.empty()) name = join(dim_names, "_");
  State flat;
  flat.device = state_->device;
  flat.layout = state_->layout.merged(dims);
  flat.coordinate = state_->merged_coordinate(dims);
  flat.family = state_->family;
  const int64_t merged_dim = state_->layout.merged_position(dims);
  for (int64_t dim = 0; dim < ndim(); ++dim) {
    if (dim == merged_dim) {
      flat.dim_names.push_back(name);
      flat.dims.push_back(nullptr);  // made below, once the names are known to be good
    } else if (std::find(dims.begin(), dims.end(), dim) == dims.end()) {
      flat.dim_names.push_back(state_->dim_names[static_cast<size_t>(dim)]);
      flat.dims.push_back(state_->dims[static_cast<size_t>(dim)]);
    }
  }
  check_names(flat.dim_names, flat.dim_names.size(), rank());
  flat.dims[static_cast<size_t>(merged_dim)] = state_->merged_groups(dims, name);
  return DeviceMesh(std::move(flat).complete());
}

DeviceMesh DeviceMesh::neighbours(int64_t dim, int64_t n) const {
  const auto index = static_cast<int64_t>(state_->index_of(dim));
  const bool divides = n >= 1 && size(index) % n == 0;
  const auto split = divides ? state_->layout.split(index, n) : std::nullopt;
  TORCH_CHECK_VALUE(split, "DeviceMesh::neighbours: n is ", n, ", which does not divide dimension ",
                    index, " of ", to_string(*this), " (rank ", rank(), ")");
  const auto coordinate = *split->coordinate_of(state_->layout.position_of(state_->coordinate));
  State block;
  block.device = state_->device;
  block.layout = split->along({index + 1}, coordinate);
  block.coordinate = {coordinate[static_cast<size_t>(index) + 1]};
  block.family = state_->family;
  block.dims = {n == size(index) ? state_->dims[static_cast<size_t>(index)]
                                 : state_->groups_of(block.layout.positions(), {index},
                                                     c10::str("making of ", n, " neighbours"),
                                                     "mesh_block_" + std::to_string(n))};
  return DeviceMesh(std::move(block).complete());
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  return a.state_ == b.state_ || (a.device_type() == b.device_type() && a.shape() == b.shape() &&
                                  a.ranks() == b.ranks() && a.dim_names() == b.dim_names());
}

size_t DeviceMesh::hash() const {
  return c10::get_hash(static_cast<int>(device_type()), shape(), ranks(), join(dim_names(), "\n"));
}

DeviceMesh init_device_mesh(c10::DeviceType device_type, Indices shape, Names dim_names) {
  if (!is_process_group_initialized()) init_process_group();
  const auto world = internal::default_dimension();
  const int64_t rank = world->group()->getRank();
  const int64_t world_size = world->group()->getSize();
  check_device_type(world->group(), device_type, rank);
  check_shape(shape, world_size, "the size of the default process group", rank);
  check_names(dim_names, shape.size(), rank);

  DeviceMesh::State state;
  state.device = internal::current_device(device_type);
  state.layout = MeshLayout::row_major(shape);
  state.coordinate = *state.layout.coordinate_of(rank);
  state.family = std::make_shared<Family>();
  state.family->ranks = state.layout.positions();
  state.family->world = world;
  const bool makes_groups =
      std::any_of(shape.begin(), shape.end(), [&](int64_t size) { return size != world_size; });
  if (makes_groups)
    world->announce(c10::str("init_device_mesh of shape ", c10::IntArrayRef(shape)));
  for (int64_t dim = 0; dim < state.layout.ndim(); ++dim) {
    const Indices members = state.layout.along({dim}, state.coordinate).positions();
    if (shape[static_cast<size_t>(dim)] == world_size) {
      state.dims.push_back(world);
      continue;
    }
    const std::string name =
        dim_names.empty() ? std::to_string(dim) : dim_names[static_cast<size_t>(dim)];
    state.dims.push_back(world->make_subset(members, "mesh_" + name));
  }
  state.dim_names = std::move(dim_names);
  const DeviceMesh mesh(std::move(state).complete());
  // Nobody goes on, or ends and takes the store along, while others still connect.
  if (makes_groups) {
    internal::Collectives::of(world->group(), device_type)
        .barrier("barrier of init_device_mesh of " + to_string(mesh));
  }
  return mesh;
}

DeviceMesh init_hybrid_mesh(c10::DeviceType device_type, int64_t ranks_per_node) {
  if (!is_process_group_initialized()) init_process_group();
  const auto& group = default_process_group();
  const int64_t world_size = group->getSize();
  TORCH_CHECK_VALUE(ranks_per_node > 0 && world_size % ranks_per_node == 0,
                    "init_hybrid_mesh: ranks_per_node is ", ranks_per_node,
                    "; it must divide the size of the default process group, ", world_size,
                    " (rank ", group->getRank(), ")");
  return init_device_mesh(device_type, {world_size / ranks_per_node, ranks_per_node},
                          {"replicate", "shard"});
}

DeviceMesh default_mesh() {
  if (!is_process_group_initialized()) init_process_group();
  const auto world = internal::default_dimension();
  if (const auto held = std::static_pointer_cast<const DeviceMesh::State>(world->held_mesh()))
    return DeviceMesh(held);
  const auto accelerator = internal::visible_accelerator();
  const bool on_device = accelerator && internal::serves(world->group(), *accelerator);
  auto mesh = init_device_mesh(on_device ? *accelerator : c10::kCPU, {world->group()->getSize()});
  world->remember_mesh(mesh.state_);
  return mesh;
}

c10::Device local_device(const DeviceMesh& mesh) { return mesh.state_->device; }

std::string to_string(const DeviceMesh& mesh) { return mesh.state_->text; }

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) {
  return out << to_string(mesh);
}

}  // namespace fsdp
