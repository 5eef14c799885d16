#include "optim/internal/owner_exchange.h"

#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/on_mesh/mesh_collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <utility>

namespace fsdp::internal {
namespace {

using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// What all ranks must plan alike, in a number.
size_t hash_of(const std::vector<OwnedTensor>& tensors) {
  size_t hash = tensors.size();
  const auto add = [&hash](size_t value) { hash = c10::hash_combine(hash, value); };
  for (const auto& tensor : tensors) {
    for (const int64_t size : tensor.layout.shape()) add(static_cast<size_t>(size));
    for (const auto& placement : tensor.layout.placements()) add(placement.hash());
    for (const int64_t index : tensor.owner) add(static_cast<size_t>(index));
    add(static_cast<size_t>(tensor.dtype));
  }
  return hash;
}

bool is_in_line(const std::vector<int64_t>& coordinate, const std::vector<int64_t>& owner,
                size_t behind) {
  for (size_t dim = behind + 1; dim < coordinate.size(); ++dim)
    if (coordinate[dim] != owner[dim]) return false;
  return true;
}

// Where a box lies in the whole, and in the part that it is of.
struct BoxViews {
  at::Tensor in_whole, in_part;
};

BoxViews views_of(const LocalBox& box, const at::Tensor& whole, const at::Tensor& part) {
  BoxViews views{whole, part};
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    const auto& range = box.box[static_cast<size_t>(dim)];
    views.in_whole = views.in_whole.narrow(dim, range.offset, range.length);
    views.in_part = views.in_part.narrow(dim, box.begin[static_cast<size_t>(dim)], range.length);
  }
  return views;
}

void put_into(const at::Tensor& whole, const PartsAlong& parts, int64_t index,
              const at::Tensor& part) {
  for (const auto& box : parts.boxes_at(index)) {
    const auto views = views_of(box, whole, part);
    views.in_whole.copy_(views.in_part);
  }
}

// Contiguous.
at::Tensor cut_out(const at::Tensor& whole, const PartsAlong& parts, int64_t index) {
  if (!parts.is_cut()) return whole.contiguous();
  at::Tensor part = at::empty(parts.shape_at(index), whole.options());
  for (const auto& box : parts.boxes_at(index)) {
    const auto views = views_of(box, whole, part);
    views.in_part.copy_(views.in_whole);
  }
  return part;
}

}  // namespace

// Takes one tensor after another out of what the ranks of a row have sent.
class Received {
 public:
  explicit Received(std::vector<at::Tensor> bytes)
      : bytes_(std::move(bytes)), offsets_(bytes_.size(), 0) {}

  at::Tensor next(int64_t from, const std::vector<int64_t>& shape, at::ScalarType dtype) {
    const auto& bytes = bytes_[static_cast<size_t>(from)];
    auto& offset = offsets_[static_cast<size_t>(from)];
    const auto elements = c10::multiply_integers(shape);
    if (elements == 0) return at::empty(shape, bytes.options().dtype(dtype));
    const auto size = elements * static_cast<int64_t>(c10::elementSize(dtype));
    const auto place = std::exchange(offset, offset + size);
    return bytes.narrow(0, place, size).view(dtype).view(shape);
  }

 private:
  std::vector<at::Tensor> bytes_;  // by index in the row
  std::vector<int64_t> offsets_;
};

OwnerExchange::OwnerExchange(DeviceMesh mesh, std::vector<OwnedTensor> tensors,
                             const std::string& what)
    : mesh_(std::move(mesh)),
      tensors_(std::move(tensors)),
      what_(c10::str(what, " of ", tensors_.size(), " tensors (plan ", hash_of(tensors_), ")")) {
  for (size_t dim = 0; dim < mesh_.shape().size(); ++dim) {
    auto& rows = rows_.emplace_back();
    for (const auto& tensor : tensors_)
      rows.push_back({PartsAlong(tensor.layout, dim, mesh_.coordinate()),
                      is_in_line(mesh_.coordinate(), tensor.owner, dim)});
  }
}

int64_t OwnerExchange::own_index(size_t dim) const { return mesh_.coordinate()[dim]; }

bool OwnerExchange::is_owner(size_t tensor) const {
  return mesh_.coordinate() == tensors_[tensor].owner;
}

void OwnerExchange::start(std::vector<at::Tensor> parts) {
  here_ = std::move(parts);
  issue(dims() - 1, Way::kToOwners);
}

std::vector<at::Tensor> OwnerExchange::wait() {
  for (size_t dim = dims(); dim-- > 0;) {
    arrive(dim, Way::kToOwners);
    if (dim > 0) issue(dim - 1, Way::kToOwners);
  }
  return std::exchange(here_, {});
}

void OwnerExchange::start_back(std::vector<at::Tensor> wholes) {
  here_ = std::move(wholes);
  issue(0, Way::kBack);
}

std::vector<at::Tensor> OwnerExchange::wait_back() {
  for (size_t dim = 0; dim < dims(); ++dim) {
    arrive(dim, Way::kBack);
    if (dim + 1 < dims()) issue(dim + 1, Way::kBack);
  }
  return std::exchange(here_, {});
}

std::vector<at::Tensor> OwnerExchange::sent_to(size_t dim, Way way, int64_t to) const {
  std::vector<at::Tensor> sent;
  const auto own = own_index(dim);
  for (size_t i = 0; to != own && i < tensors_.size(); ++i) {
    const auto& row = rows_[dim][i];
    const auto owner = tensors_[i].owner[dim];
    if (!row.takes_part) continue;
    if (way == Way::kToOwners) {
      if (to == owner && row.parts.is_cut()) sent.push_back(here_[i]);
    } else if (own == owner) {
      sent.push_back(cut_out(here_[i], row.parts, to));
    }
  }
  return sent;
}

int64_t OwnerExchange::bytes_from(size_t dim, Way way, int64_t from) const {
  int64_t bytes = 0;
  const auto own = own_index(dim);
  for (size_t i = 0; from != own && i < tensors_.size(); ++i) {
    const auto& row = rows_[dim][i];
    const auto owner = tensors_[i].owner[dim];
    const bool comes = way == Way::kToOwners ? own == owner && row.parts.is_cut() : from == owner;
    if (!row.takes_part || !comes) continue;
    bytes += row.parts.elements_at(way == Way::kToOwners ? from : own) *
             static_cast<int64_t>(c10::elementSize(tensors_[i].dtype));
  }
  return bytes;
}

void OwnerExchange::issue(size_t dim, Way way) {
  if (!has_others(dim)) return;
  const BelowAutograd below_autograd;
  const auto mesh_dim = static_cast<int64_t>(dim);
  AllToAllOptions options{
      .what = c10::str(way == Way::kToOwners ? "exchange to owners: " : "exchange from owners: ",
                       what_, " along dimension ", dim, " of ", to_string(mesh_))};
  std::vector<at::Tensor> all = {
      at::empty({0}, at::TensorOptions().dtype(at::kByte).device(local_device(mesh_)))};
  for (int64_t peer = 0; peer < mesh_.size(mesh_dim); ++peer) {
    auto& bytes = options.input_split_sizes.emplace_back(0);
    for (const auto& sent : sent_to(dim, way, peer)) {
      if (sent.numel() == 0) continue;
      bytes += static_cast<int64_t>(sent.nbytes());
      all.push_back(tensor_bytes(sent));
    }
    options.output_split_sizes.push_back(bytes_from(dim, way, peer));
    received_bytes_ += options.output_split_sizes.back();
  }
  options.input = at::cat(all);
  in_flight_.emplace(collectives_of(mesh_, mesh_dim).start(options));
  ++issued_;
}

void OwnerExchange::arrive(size_t dim, Way way) {
  if (!has_others(dim)) return;
  const BelowAutograd below_autograd;
  auto in_flight = std::exchange(in_flight_, std::nullopt);
  Received received(in_flight->wait());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!rows_[dim][i].takes_part) continue;
    here_[i] = way == Way::kToOwners ? whole_of(i, dim, received) : part_of(i, dim, received);
  }
}

at::Tensor OwnerExchange::whole_of(size_t tensor, size_t dim, Received& received) const {
  const auto& parts = rows_[dim][tensor].parts;
  const auto own = own_index(dim);
  if (own != tensors_[tensor].owner[dim]) return {};
  if (!parts.is_cut()) return here_[tensor];
  at::Tensor whole = at::empty(parts.whole_shape(), here_[tensor].options());
  for (int64_t peer = 0; peer < parts.ranks(); ++peer) {
    put_into(whole, parts, peer,
             peer == own ? here_[tensor]
                         : received.next(peer, parts.shape_at(peer), tensors_[tensor].dtype));
  }
  return whole;
}

at::Tensor OwnerExchange::part_of(size_t tensor, size_t dim, Received& received) const {
  const auto& parts = rows_[dim][tensor].parts;
  const auto own = own_index(dim);
  const auto owner = tensors_[tensor].owner[dim];
  if (own == owner) return cut_out(here_[tensor], parts, own);
  return received.next(owner, parts.shape_at(own), tensors_[tensor].dtype).clone();
}

}  // namespace fsdp::internal
