#include "checkpoint/plan/whole_values.h"

#include "checkpoint/io/file_writing.h"
#include "checkpoint/ranks/tensor_values.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/layout/shard_layout.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// Plain tensors that are sent together; distributed ones end with their unit.
constexpr int64_t kSentTogether = int64_t{64} << 20;

// Memory of more than this is the system's again as soon as it is free (mallopt(3),
// M_MMAP_THRESHOLD).
constexpr int64_t kGivenBack = int64_t{32} << 20;

// How a tensor is cut into rows of bytes, one per rank.
struct Cut {
  int64_t mesh_dim = -1;  // none: whole, of rank 0
  int64_t dim = -1;
  int64_t parts = 1;
};

// Of a tensor that one mesh dimension cuts; parts = 1 for any other.
Cut cut_of(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return {};
  const auto& spec = spec_of(tensor);
  Cut cut;
  for (int64_t m = 0; m < spec.mesh().ndim(); ++m) {
    const Placement& placement = spec.placements()[static_cast<size_t>(m)];
    if (spec.mesh().size(m) == 1 || placement.is_replicate()) continue;
    if (cut.parts > 1 || !placement.is_shard() || placement.is_interleaved()) return {};
    cut = {m, placement.shard_dim(), spec.mesh().size(m)};
  }
  return cut;
}

std::vector<int64_t> shape_of_part(const at::Tensor& tensor, const Cut& cut, int64_t index) {
  auto shape = tensor.sizes().vec();
  if (cut.dim < 0) return shape;
  auto& length = shape[static_cast<size_t>(cut.dim)];
  length = chunk_of(length, cut.parts, index).length;
  return shape;
}

// What `tensor` takes in a row: as much as its largest part, the first, needs.
int64_t bytes_in_row(const at::Tensor& tensor, const Cut& cut) {
  const auto shape = shape_of_part(tensor, cut, 0);
  const int64_t numel =
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  return staged_size(numel * static_cast<int64_t>(tensor.element_size()));
}

at::Tensor bytes_of(const at::Tensor& value) {
  return internal::tensor_bytes(value.resolve_neg().resolve_conj().contiguous());
}

bool every_rank_has_all(const at::Tensor& dtensor) {
  const auto& spec = spec_of(dtensor);
  return spec.mesh().size() == 1 ||
         std::all_of(spec.placements().begin(), spec.placements().end(),
                     [](const Placement& placement) { return placement.is_replicate(); });
}

// The value of one tensor, moved by itself, as next() gives it.
at::Tensor whole_value(const at::Tensor& tensor, const World& world) {
  if (is_dtensor(tensor)) {
    if (every_rank_has_all(tensor)) return local_value(tensor);
    return DTensor(tensor.detach()).full_tensor();
  }
  if (!world.group || world.size == 1) return tensor.detach();
  at::Tensor value = tensor.detach().clone(c10::MemoryFormat::Contiguous);
  world.collectives(value.device().type())
      .broadcast({.tensor = value, .what = "save: values of rank 0"});
  return value;
}

}  // namespace

at::Tensor ReusedBytes::take(int64_t bytes, c10::Device device) {
  if (!memory_.defined() || memory_.numel() < bytes || memory_.device() != device) {
    memory_.reset();  // before the larger one is made
    memory_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
  }
  return memory_.narrow(0, 0, bytes);
}

at::Tensor WholeValues::next() {
  const c10::NoGradGuard no_grad;
  if (next_ == end_) bring();
  const at::Tensor tensor = std::exchange(tensors_[next_++].tensor, at::Tensor());
  if (!rows_.defined()) return whole_value(tensor, world_);
  at::Tensor value = unpacked(tensor, offset_);
  offset_ += bytes_in_row(tensor, cut_of(tensor));
  if (next_ == end_) rows_ = at::Tensor();
  return value;
}

bool WholeValues::go_together(const NamedTensor& first, const NamedTensor& other) const {
  const Cut cut = cut_of(first.tensor), its_cut = cut_of(other.tensor);
  if (first.tensor.device() != other.tensor.device() || cut.mesh_dim != its_cut.mesh_dim) {
    return false;
  }
  if (!is_dtensor(first.tensor)) return !is_dtensor(other.tensor) && world_.size > 1;
  return first.unit != nullptr && first.unit == other.unit && cut.parts > 1 &&
         spec_of(first.tensor).mesh() == spec_of(other.tensor).mesh();
}

void WholeValues::bring() {
  const NamedTensor& first = tensors_[next_];
  const Cut cut = cut_of(first.tensor);
  int64_t bytes = bytes_in_row(first.tensor, cut);
  for (end_ = next_ + 1; end_ < tensors_.size() && go_together(first, tensors_[end_]); ++end_) {
    const int64_t more = bytes_in_row(tensors_[end_].tensor, cut_of(tensors_[end_].tensor));
    if (cut.parts == 1 && bytes + more > kSentTogether) break;
    bytes += more;
  }
  const bool alone = end_ == next_ + 1;
  if (bytes == 0 || (alone && (cut.parts == 1 || bytes * cut.parts > kGivenBack))) {
    end_ = next_ + 1;  // moved by itself, or not at all
    return;
  }
  const at::Tensor row = row_memory_.take(bytes, first.tensor.device());
  offset_ = 0;
  for (size_t i = next_; i < end_; ++i) {
    const at::Tensor& tensor = tensors_[i].tensor;
    const at::Tensor mine = bytes_of(local_value(tensor));
    row.narrow(0, offset_, mine.numel()).copy_(mine);
    offset_ += bytes_in_row(tensor, cut_of(tensor));
  }
  offset_ = 0;
  move(row, cut.parts);
}

void WholeValues::move(const at::Tensor& row, int64_t parts) {
  const at::Tensor& first = tensors_[next_].tensor;
  const std::string names = "'" + tensors_[next_].name + "' to '" + tensors_[end_ - 1].name + "'";
  if (parts == 1) {
    world_.collectives(row.device().type())
        .broadcast({.tensor = row, .what = "broadcast of rank 0's values of " + names});
    rows_ = row.view({1, -1});
    return;
  }
  const int64_t mesh_dim = cut_of(first).mesh_dim;
  const DeviceMesh& mesh = spec_of(first).mesh();
  const at::Tensor rows =
      rows_memory_.take(parts * row.numel(), row.device()).view({parts, row.numel()});
  collectives_of(mesh, mesh_dim)
      .all_gather({.output = rows, .input = row, .what = "all-gather of " + names});
  rows_ = rows;
}

at::Tensor WholeValues::value_memory(const at::Tensor& like) {
  const auto bytes = like.numel() * static_cast<int64_t>(like.element_size());
  if (bytes > kGivenBack) return at::empty(like.sizes(), rows_.options().dtype(like.scalar_type()));
  return value_memory_.take(bytes, rows_.device()).view(like.scalar_type()).view(like.sizes());
}

at::Tensor WholeValues::unpacked(const at::Tensor& tensor, int64_t offset) {
  const Cut cut = cut_of(tensor);
  const at::Tensor whole = value_memory(tensor);
  for (int64_t index = 0; index < cut.parts; ++index) {
    const auto shape = shape_of_part(tensor, cut, index);
    at::Tensor place = whole;
    if (cut.dim >= 0) {
      const Chunk chunk = chunk_of(tensor.size(cut.dim), cut.parts, index);
      place = whole.narrow(cut.dim, chunk.offset, chunk.length);
    }
    const int64_t bytes = place.numel() * static_cast<int64_t>(tensor.element_size());
    if (bytes == 0) continue;
    place.copy_(rows_[index].narrow(0, offset, bytes).view(tensor.scalar_type()).view(shape));
  }
  return whole;
}

}  // namespace fsdp::internal::checkpoint
