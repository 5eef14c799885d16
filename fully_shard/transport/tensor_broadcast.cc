#include "fully_shard/transport/tensor_broadcast.h"

#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/internal/mesh_layout.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "fully_shard/transport/broadcast_buckets.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace fsdp::internal {
namespace {

// The bytes of the tensors, one bucket after another.
class Bytes {
 public:
  explicit Bytes(const std::vector<BroadcastTensor>& tensors) : tensors_(tensors) {}

  // Into `row`, uint8 [bytes of the bucket].
  void read(const Bucket& bucket, const at::Tensor& row) {
    int64_t begin = 0;
    for (const auto& piece : bucket) {
      row.narrow(0, begin, piece.bytes).copy_(memory_of(piece));
      begin += piece.bytes;
    }
  }
  // From `row`. A tensor has its new values after its last piece.
  void write(const Bucket& bucket, const at::Tensor& row) {
    int64_t begin = 0;
    for (const auto& piece : bucket) {
      memory_of(piece).copy_(row.narrow(0, begin, piece.bytes));
      begin += piece.bytes;
      const bool is_last = piece.offset + piece.bytes == flat_.numel();
      if (is_last && !dense_.is_alias_of(tensor_)) tensor_.copy_(dense_);
    }
  }

 private:
  at::Tensor memory_of(const BucketPiece& piece) {
    if (piece.offset == 0) open(tensors_[piece.tensor].tensor);
    return flat_.narrow(0, piece.offset, piece.bytes);
  }
  void open(const at::Tensor& tensor) {
    tensor_ = tensor.detach();
    dense_ = tensor_.resolve_neg().resolve_conj().contiguous();
    flat_ = tensor_bytes(dense_);
  }

  const std::vector<BroadcastTensor>& tensors_;
  at::Tensor tensor_;        // the one whose pieces are met
  at::Tensor dense_, flat_;  // its own memory, or a copy where it is not contiguous
};

int64_t bytes_of(const Bucket& bucket) {
  int64_t bytes = 0;
  for (const auto& piece : bucket) bytes += piece.bytes;
  return bytes;
}

// The row of the rank at `src`. Along a dimension only those take part that stand where
// `src` does in all later ones: they have the row already, or get it now.
void broadcast_row(const at::Tensor& row, const DeviceMesh& mesh, const std::vector<int64_t>& src,
                   const std::string& what) {
  const auto& here = mesh.coordinate();
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    const bool takes_part = std::equal(here.begin() + dim + 1, here.end(), src.begin() + dim + 1);
    if (!takes_part || mesh.size(dim) == 1) continue;
    collectives_of(mesh, dim).broadcast(
        {.tensor = row, .what = what, .root = src[static_cast<size_t>(dim)]});
  }
}

// "parameter 'a.weight' to buffer 'c.mask'"
std::string names_in(const Bucket& bucket, const std::vector<BroadcastTensor>& tensors) {
  const auto& first = tensors[bucket.front().tensor].name;
  const auto& last = tensors[bucket.back().tensor].name;
  return bucket.front().tensor == bucket.back().tensor ? first : first + " to " + last;
}

}  // namespace

void broadcast_tensors(const std::vector<BroadcastTensor>& tensors, const DeviceMesh& mesh,
                       int64_t src, int64_t bucket_bytes) {
  std::vector<int64_t> nbytes;
  for (const auto& each : tensors) nbytes.push_back(static_cast<int64_t>(each.tensor.nbytes()));
  const auto buckets = broadcast_buckets(nbytes, bucket_bytes);
  if (buckets.empty() || mesh.size() == 1) return;
  const auto device = tensors[buckets.front().front().tensor].tensor.device();
  const auto memory =
      at::empty({bytes_of(buckets.front())}, at::TensorOptions(at::kByte).device(device));
  const auto source = *MeshLayout::row_major(mesh.shape()).coordinate_of(src);
  const bool sends = mesh.coordinate() == source;
  Bytes bytes(tensors);
  for (const auto& bucket : buckets) {
    const auto row = memory.narrow(0, 0, bytes_of(bucket));
    if (sends) bytes.read(bucket, row);
    broadcast_row(row, mesh, source, "broadcast of " + names_in(bucket, tensors));
    if (!sends) bytes.write(bucket, row);
  }
}

}  // namespace fsdp::internal
