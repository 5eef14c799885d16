#include "dtensor/redistribute/redistribute.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/scalar_agreement.h"
#include "dtensor/strategy/redistribute_plan.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// One step of a redistribution: along one mesh dimension, all others staying as they are.
// The table of what is sent is in redistribute.h.
class RedistributeStep {
 public:
  // `unsharded_shape`: the local shape once this mesh dimension's cut is undone. `moved`:
  // the DTensor, or null where only a local tensor is known. All outlive it.
  RedistributeStep(const DeviceMesh& mesh, int64_t mesh_dim, std::vector<int64_t> unsharded_shape,
                   const at::Tensor* moved, ScalarAgreement& scalars);

  // This rank's part afterwards. Collective over the mesh dimension, but from Replicate
  // and where nothing changes.
  at::Tensor run(const at::Tensor& local, const Placement& from, const Placement& to);

 private:
  at::Tensor run_part(const at::Tensor& local, const Placement& from, const Placement& to) const;
  at::Tensor moved_terms(const at::Tensor& terms, const Placement& from, const Placement& to) const;
  at::Tensor run_on_atoms(const at::Tensor& local, const Placement& from,
                          const Placement& to) const;
  at::Tensor run_on_units(const at::Tensor& local, const Placement& from,
                          const Placement& to) const;
  at::Tensor gathered_units(const at::Tensor& local, const Shard& cut) const;
  at::Tensor from_owner(const at::Tensor& local, int64_t owner) const;
  RedistributeStep pairs() const;
  at::Tensor moved_as_pairs(const at::Tensor& local, const Placement& from,
                            const Placement& to) const;
  at::Tensor moved(const at::Tensor& local, const Placement& from, const Placement& to) const;
  at::Tensor replicated(const at::Tensor& local, const Placement& from) const;
  at::Tensor own_chunk(const at::Tensor& whole, int64_t dim) const;
  at::Tensor own_term(const at::Tensor& whole, Partial::Op op) const;
  at::Tensor gather(const at::Tensor& local, int64_t dim) const;
  at::Tensor reduce(const at::Tensor& local, Partial::Op op) const;
  at::Tensor reduce_shard(const at::Tensor& local, Partial::Op op, int64_t dim) const;
  at::Tensor all_to_all_shards(const at::Tensor& local, int64_t from, int64_t to) const;
  // `given`: what this rank gives to it.
  template <class Collective>
  void send(CollectiveKind kind, const at::Tensor& given, const Collective& collective) const;

  const DeviceMesh& mesh_;
  ScalarAgreement& scalars_;
  int64_t mesh_dim_;
  Placement from_ = Replicate{}, to_ = Replicate{};  // of the whole step
  Collectives collectives_;
  int64_t parts_;
  int64_t index_;
  std::vector<int64_t> shape_;
  std::string what_;
};

// To collective backends (Gloo, NCCL), as what they add up. What is only moved goes as
// bytes (collectives.h).
bool is_known_to_backends(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

// The dtype in which elements of `dtype` are reduced so that the result, cast back, is
// that of `dtype`. Throws NotImplementedError, naming `what` and the dtype, for one in
// which nothing can be added. Local; alike on all ranks.
at::ScalarType dtype_of_reduction(at::ScalarType dtype, const std::string& what) {
  if (is_known_to_backends(dtype)) return dtype;
  if (dtype == at::kShort || dtype == at::kUInt16) return at::kInt;
  if (dtype == at::kUInt32) return at::kLong;
  TORCH_CHECK_NOT_IMPLEMENTED(false, what, ": terms of dtype ", dtype,
                              " can not be reduced; cast them first, .to(torch::kFloat)");
}

ReduceOp reduce_op(Partial::Op op) {
  switch (op) {
    case Partial::Op::kSum:
    case Partial::Op::kAvg:  // divided by the caller, so that every backend does the same
      return ReduceOp::kSum;
    case Partial::Op::kMin:
      return ReduceOp::kMin;
    case Partial::Op::kMax:
      return ReduceOp::kMax;
    case Partial::Op::kProduct:
      return ReduceOp::kProduct;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown Partial op");
}

at::Tensor averaged(at::Tensor sum, Partial::Op op, int64_t parts) {
  if (op != Partial::Op::kAvg) return sum;
  return at::isFloatingType(sum.scalar_type()) ? sum.div_(parts) : sum.div_(parts, "trunc");
}

// `tensor` with `dim` grown to `size` by zeros at its end.
at::Tensor padded(const at::Tensor& tensor, int64_t dim, int64_t size) {
  const int64_t missing = size - tensor.size(dim);
  if (missing == 0) return tensor;
  std::vector<int64_t> pad(2 * (tensor.dim() - dim), 0);
  pad.back() = missing;
  return at::constant_pad_nd(tensor, pad, 0);
}

// What `placement` is once dimension `dim`, the only one that may be interleaved, is
// split so.
Placement along_atoms(const Placement& placement, int64_t dim) {
  if (!placement.is_shard() || placement.shard_dim() < dim) return placement;
  if (placement.shard_dim() == dim) return Shard{dim + 1};
  return placement.along(placement.shard_dim() + 2);
}

// As announcements have it, since ranks that move DTensors of one shape in different
// orders would exchange their parts: " (parameter '0.weight' of unit '(root)' (number 0),
// for aten::norm)", or less. `moved`: null where only a local tensor is known.
std::string what_moves(const at::Tensor* moved) {
  std::string text = moved == nullptr ? std::string() : description_of(*moved);
  const std::string mover = CommOperatorScope::current();
  if (!mover.empty()) text += (text.empty() ? "for " : ", for ") + mover;
  return text.empty() ? text : " (" + text + ")";
}

RedistributeStep::RedistributeStep(const DeviceMesh& mesh, int64_t mesh_dim,
                                   std::vector<int64_t> unsharded_shape, const at::Tensor* moved,
                                   ScalarAgreement& scalars)
    : mesh_(mesh),
      scalars_(scalars),
      mesh_dim_(mesh_dim),
      collectives_(collectives_of(mesh, mesh_dim)),
      parts_(mesh.size(mesh_dim)),
      index_(mesh.local_rank(mesh_dim)),
      shape_(std::move(unsharded_shape)) {
  std::ostringstream what;
  what << "redistribute of " << c10::IntArrayRef(shape_) << what_moves(moved) << " along dimension "
       << mesh_dim << " of " << mesh;
  what_ = what.str();
}

at::Tensor RedistributeStep::run(const at::Tensor& local, const Placement& from,
                                 const Placement& to) {
  from_ = from;
  to_ = to;
  return run_part(local, from, to);
}

at::Tensor RedistributeStep::run_part(const at::Tensor& local, const Placement& from,
                                      const Placement& to) const {
  if (from == to || parts_ == 1) return local;
  if (from.is_ragged() || to.is_ragged()) return run_on_units(local, from, to);
  if (from.is_interleaved() || to.is_interleaved()) return run_on_atoms(local, from, to);
  const at::Tensor plain = local.resolve_neg().resolve_conj();
  if (plain.is_complex()) return moved_as_pairs(plain, from, to);
  return from.is_partial() ? moved_terms(plain, from, to) : moved(plain, from, to);
}

at::Tensor RedistributeStep::moved_terms(const at::Tensor& terms, const Placement& from,
                                         const Placement& to) const {
  const auto dtype = dtype_of_reduction(terms.scalar_type(), what_);
  return moved(terms.to(dtype), from, to).to(terms.scalar_type());
}

// Along its atoms an interleaved cut is a plain one.
at::Tensor RedistributeStep::run_on_atoms(const at::Tensor& local, const Placement& from,
                                          const Placement& to) const {
  const bool both_cut = from.is_shard() && to.is_shard();
  if (both_cut &&
      (from.shard_dim() == to.shard_dim() || from.is_interleaved() == to.is_interleaved()))
    return run_part(run_part(local, from, Replicate{}), Replicate{}, to);
  const Shard cut = from.is_interleaved() ? from.shard() : to.shard();
  RedistributeStep on_atoms = *this;
  on_atoms.shape_ = split_shape(shape_, cut);
  const at::Tensor split = local.reshape(split_shape(local.sizes().vec(), cut));
  const at::Tensor moved =
      on_atoms.run_part(split, along_atoms(from, cut.dim), along_atoms(to, cut.dim));
  return moved.flatten(cut.dim, cut.dim + 2);
}

// Over Replicate: parts of stated sizes meet no others.
at::Tensor RedistributeStep::run_on_units(const at::Tensor& local, const Placement& from,
                                          const Placement& to) const {
  if (!to.is_ragged()) return run_part(gathered_units(local, from.shard()), Replicate{}, to);
  const at::Tensor whole =
      from.is_ragged() ? gathered_units(local, from.shard()) : run_part(local, from, Replicate{});
  const Shard& cut = to.shard();
  const int64_t unit = atom_size(cut, shape_[cut.dim]);
  const Chunk own = own_atoms(cut, shape_[cut.dim], parts_, index_);
  return whole.narrow(cut.dim, own.offset * unit, own.length * unit)
      .clone(at::MemoryFormat::Contiguous);
}

// From an owner by a broadcast; else rows as long as the longest are gathered, and what
// they have beyond their own is dropped.
at::Tensor RedistributeStep::gathered_units(const at::Tensor& local, const Shard& cut) const {
  if (local.is_complex())
    return at::view_as_complex(pairs().gathered_units(at::view_as_real(local), cut));
  if (const auto owner = cut.local_units.owner()) return from_owner(local, *owner);
  const int64_t size = shape_[cut.dim], unit = atom_size(cut, size);
  const int64_t capacity = largest_part(cut, size, parts_);
  RedistributeStep of_rows = *this;
  of_rows.shape_[cut.dim] = capacity * parts_;
  const at::Tensor rows = of_rows.gather(padded(local, cut.dim, capacity), cut.dim);
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i < parts_; ++i)
    parts.push_back(rows.narrow(cut.dim, i * capacity, cut.local_units.at(i) * unit));
  return at::cat(parts, cut.dim);
}

at::Tensor RedistributeStep::from_owner(const at::Tensor& local, int64_t owner) const {
  const at::Tensor whole = index_ == owner ? local.clone(at::MemoryFormat::Contiguous)
                                           : at::empty(shape_, local.options());
  if (whole.numel() > 0) {
    send(CollectiveKind::kBroadcast, whole, [&](NoticeWords words) {
      return collectives_.broadcast(
          {.tensor = whole, .what = what_, .root = owner, .words = words});
    });
  }
  return whole;
}

// Backends know no complex numbers: they move as pairs of real ones.
at::Tensor RedistributeStep::moved_as_pairs(const at::Tensor& local, const Placement& from,
                                            const Placement& to) const {
  for (const Placement& placement : {from, to}) {
    const bool linear = !placement.is_partial() || placement.partial_op() == Partial::Op::kSum ||
                        placement.partial_op() == Partial::Op::kAvg;
    TORCH_CHECK_NOT_IMPLEMENTED(linear, what_, ": ", placement,
                                " of complex numbers; only sum and avg are reduced");
  }
  return at::view_as_complex(pairs().moved(at::view_as_real(local), from, to));
}

// The same step of the real and imaginary parts, along a last dimension of their own.
RedistributeStep RedistributeStep::pairs() const {
  RedistributeStep pairs = *this;
  pairs.shape_.push_back(2);
  return pairs;
}

at::Tensor RedistributeStep::moved(const at::Tensor& local, const Placement& from,
                                   const Placement& to) const {
  if (from.is_shard() && to.is_shard())
    return all_to_all_shards(local, from.shard_dim(), to.shard_dim());
  if (from.is_partial() && to.is_shard())
    return reduce_shard(local, from.partial_op(), to.shard_dim());
  const at::Tensor whole = replicated(local, from);
  if (to.is_shard()) return own_chunk(whole, to.shard_dim()).clone(at::MemoryFormat::Contiguous);
  if (to.is_partial()) return own_term(whole, to.partial_op());
  return whole;
}

at::Tensor RedistributeStep::replicated(const at::Tensor& local, const Placement& from) const {
  if (from.is_shard()) return gather(local, from.shard_dim());
  if (from.is_partial()) return reduce(local, from.partial_op());
  return local;
}

at::Tensor RedistributeStep::own_chunk(const at::Tensor& whole, int64_t dim) const {
  const Chunk own = chunk_of(shape_[dim], parts_, index_);
  return whole.narrow(dim, own.offset, own.length);
}

at::Tensor RedistributeStep::own_term(const at::Tensor& whole, Partial::Op op) const {
  if (index_ == 0 || op == Partial::Op::kAvg || op == Partial::Op::kMin ||
      op == Partial::Op::kMax) {
    return whole.clone();
  }
  return at::full_like(whole, op == Partial::Op::kProduct ? 1 : 0);
}

at::Tensor RedistributeStep::gather(const at::Tensor& local, int64_t dim) const {
  const int64_t capacity = chunk_capacity(shape_[dim], parts_);
  const at::Tensor input = padded(local, dim, capacity).movedim(dim, 0).contiguous();
  auto rows = input.sizes().vec();
  rows[0] *= parts_;
  const at::Tensor output = at::empty(rows, input.options());
  if (output.numel() > 0) {
    send(CollectiveKind::kAllGather, input, [&](NoticeWords words) {
      return collectives_.all_gather(
          {.output = output, .input = input, .what = what_, .words = words});
    });
  }
  return output.narrow(0, 0, shape_[dim]).movedim(0, dim).contiguous();
}

at::Tensor RedistributeStep::reduce(const at::Tensor& local, Partial::Op op) const {
  at::Tensor sum = local.clone(at::MemoryFormat::Contiguous);
  if (sum.numel() > 0) {
    send(CollectiveKind::kAllReduce, sum, [&](NoticeWords words) {
      return collectives_.all_reduce(
          {.tensor = sum, .what = what_, .op = reduce_op(op), .words = words});
    });
  }
  return averaged(std::move(sum), op, parts_);
}

at::Tensor RedistributeStep::reduce_shard(const at::Tensor& local, Partial::Op op,
                                          int64_t dim) const {
  const int64_t capacity = chunk_capacity(shape_[dim], parts_);
  const at::Tensor input = padded(local, dim, capacity * parts_).movedim(dim, 0).contiguous();
  auto rows = input.sizes().vec();
  rows[0] = capacity;
  const at::Tensor output = at::empty(rows, input.options());
  if (output.numel() > 0) {
    send(CollectiveKind::kReduceScatter, input, [&](NoticeWords words) {
      return collectives_.reduce_scatter(
          {.output = output, .input = input, .what = what_, .op = reduce_op(op), .words = words});
    });
  }
  const int64_t length = chunk_of(shape_[dim], parts_, index_).length;
  return averaged(output.narrow(0, 0, length).movedim(0, dim).contiguous(), op, parts_);
}

at::Tensor RedistributeStep::all_to_all_shards(const at::Tensor& local, int64_t from,
                                               int64_t to) const {
  const int64_t from_capacity = chunk_capacity(shape_[from], parts_);
  const int64_t to_capacity = chunk_capacity(shape_[to], parts_);
  at::Tensor input = padded(padded(local, from, from_capacity), to, to_capacity * parts_);
  input = input.unflatten(to, at::IntArrayRef{parts_, to_capacity}).movedim(to, 0).contiguous();
  const at::Tensor output = at::empty_like(input);
  if (output.numel() > 0) {
    send(CollectiveKind::kAllToAll, input, [&](NoticeWords words) {
      return collectives_.all_to_all(
          {.output = output, .input = input, .what = what_, .words = words});
    });
  }
  return output.movedim(0, from)
      .flatten(from, from + 1)
      .narrow(from, 0, shape_[from])
      .narrow(to, 0, chunk_of(shape_[to], parts_, index_).length)
      .contiguous();
}

template <class Collective>
void RedistributeStep::send(CollectiveKind kind, const at::Tensor& given,
                            const Collective& collective) const {
  const auto bytes = static_cast<int64_t>(given.nbytes());
  const auto event = [&] {
    return CommEvent{.operator_name = CommOperatorScope::current(),
                     .cause = CommCauseScope::current(),
                     .kind = kind,
                     .mesh = mesh_,
                     .mesh_dim = mesh_dim_,
                     .from = from_,
                     .to = to_,
                     .shape = shape_,
                     .bytes = bytes};
  };
  issue_comm(bytes, event, [&] { scalars_.send(collective); });
}

// What follows is for whole redistributions, which take such steps.

// `tensor` with its dimensions in `order` in memory: steps make row-major parts, whatever
// the strides.
at::Tensor in_memory_order(const at::Tensor& tensor, const std::vector<int64_t>& order) {
  if (std::is_sorted(order.begin(), order.end())) return tensor;
  std::vector<int64_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[order[i]] = static_cast<int64_t>(i);
  return tensor.permute(order).contiguous().permute(inverse);
}

// The local shape of a tensor placed so, but for the cut of mesh dimension `m`.
std::vector<int64_t> shape_without_cut(size_t m, std::vector<Placement> placements,
                                       const DTensorSpec& spec) {
  placements[m] = Replicate{};
  return local_shape(spec.shape(), spec.mesh().shape(), placements, spec.mesh().coordinate());
}

// The scalars of what is moved: of the DTensor, where there is one. What an operator
// moves else has those of the results that it makes.
const ScalarHash& scalars_of(const at::Tensor* moved) {
  return moved == nullptr ? NewDTensors::current().scalars : meta_of(*moved).scalars;
}

// `moved`: the DTensor of that local tensor, where there is one.
at::Tensor redistribute(const at::Tensor& local, const DTensorSpec& from,
                        const std::vector<Placement>& to, const at::Tensor* moved) {
  if (from.placements() == to) return local;
  // Bytes are sent, which are not the values while a conjugation or negation waits.
  at::Tensor part = local.resolve_conj().resolve_neg();
  ScalarAgreement scalars(scalars_of(moved), part.numel() > 0);
  auto placements = from.placements();
  for (const auto& move : redistribute_plan(placements, to)) {
    RedistributeStep step(from.mesh(), static_cast<int64_t>(move.mesh_dim),
                          shape_without_cut(move.mesh_dim, placements, from), moved, scalars);
    part = step.run(part, move.from, move.to);
    placements[move.mesh_dim] = move.to;
  }
  scalars.check(from.mesh());
  return in_memory_order(part, memory_order(from.shape(), from.stride()));
}

// Atoms [own] of every block, dimensions in the order of memory.
at::Tensor part_along(const at::Tensor& whole, const Shard& cut, const Chunk& own) {
  const int64_t unit = atom_size(cut, whole.size(cut.dim));
  if (cut.outer == 1) return whole.narrow(cut.dim, own.offset * unit, own.length * unit);
  const at::Tensor part = whole.reshape(split_shape(whole.sizes().vec(), cut))
                              .narrow(cut.dim + 1, own.offset, own.length)
                              .flatten(cut.dim, cut.dim + 2);
  return in_memory_order(part, memory_order(whole.sizes().vec(), whole.strides().vec()));
}

}  // namespace

at::Tensor local_part(const at::Tensor& full, const DTensorSpec& spec) {
  at::Tensor part = at::alias(full);
  for (size_t m = 0; m < spec.placements().size(); ++m) {
    if (!spec.placements()[m].is_shard()) continue;
    const Shard& cut = spec.placements()[m].shard();
    const auto mesh_dim = static_cast<int64_t>(m);
    const Chunk own = own_atoms(cut, part.size(cut.dim), spec.mesh().size(mesh_dim),
                                spec.mesh().local_rank(mesh_dim));
    part = part_along(part, cut, own);
  }
  return part;
}

at::Tensor placed_whole(const at::Tensor& full, const DTensorSpec& spec) {
  if (!spec.has_partial()) return local_part(full, spec);
  return redistribute_local(full, spec.replicated(), spec.placements());
}

at::Tensor redistribute_local(const at::Tensor& local, const DTensorSpec& from,
                              const std::vector<Placement>& to) {
  return redistribute(local, from, to, /*moved=*/nullptr);
}

at::Tensor moved_part(const at::Tensor& dtensor, const std::vector<Placement>& to) {
  return redistribute(local_of(dtensor), spec_of(dtensor), to, &dtensor);
}

bool must_move(const DTensorSpec& from, const std::vector<Placement>& to) {
  for (size_t m = 0; m < to.size(); ++m) {
    const bool stays = from.placements()[m] == to[m] || from.placements()[m].is_replicate();
    if (!stays && from.mesh().size(static_cast<int64_t>(m)) > 1) return true;
  }
  return false;
}

at::Tensor redistribute_dtensor(const at::Tensor& dtensor, const std::vector<Placement>& to) {
  const DTensorSpec& from = spec_of(dtensor);
  if (from.placements() == to) return dtensor;
  const DTensorSpec target(from.mesh(), to, from.shape(),
                           dtensor.is_non_overlapping_and_dense()
                               ? from.stride()
                               : dense_strides(from.shape(), from.stride()));
  const NewFromParameter origin(meta_of(dtensor).from_parameter, meta_of(dtensor).scalars);
  return make_dtensor(moved_part(dtensor, to), target);
}

at::Tensor whole_value(const at::Tensor& dtensor) {
  return moved_part(dtensor, spec_of(dtensor).replicated().placements());
}

at::Tensor reduce_partials(const at::Tensor& dtensor) {
  return redistribute_dtensor(dtensor, without_partials(spec_of(dtensor).placements()));
}

}  // namespace fsdp::internal
