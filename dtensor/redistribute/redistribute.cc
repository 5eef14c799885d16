#include "dtensor/redistribute/redistribute.h"

#include "device_mesh/on_mesh/collectives_of.h"
#include "dtensor/redistribute/movement.h"
#include "dtensor/redistribute/numbers_moved.h"
#include "dtensor/redistribute/reduction_dtype.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

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

// With dimension cut.dim as blocks, atoms and elements of an atom.
std::vector<int64_t> split_shape(std::vector<int64_t> shape, const Shard& cut) {
  const auto dim = shape.begin() + cut.dim;
  const int64_t atoms = atoms_of(cut, *dim);
  *dim = cut.outer;
  shape.insert(dim + 1, {atoms, cut.unit});
  return shape;
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
  const std::string mover = MovingOperator::current();
  if (!mover.empty()) text += (text.empty() ? "for " : ", for ") + mover;
  return text.empty() ? text : " (" + text + ")";
}

// One step along one mesh dimension, all others staying as they are.
class Step {
 public:
  // `unsharded_shape`: the local shape once this mesh dimension's cut is undone.
  Step(const DeviceMesh& mesh, int64_t mesh_dim, std::vector<int64_t> unsharded_shape,
       const at::Tensor* moved, NumbersMoved& numbers)
      : mesh_(mesh),
        numbers_(numbers),
        mesh_dim_(mesh_dim),
        collectives_(collectives_of(mesh, mesh_dim)),
        parts_(mesh.size(mesh_dim)),
        index_(mesh.local_rank(mesh_dim)),
        shape_(std::move(unsharded_shape)) {
    std::ostringstream what;
    what << "redistribute of " << c10::IntArrayRef(shape_) << what_moves(moved)
         << " along dimension " << mesh_dim << " of " << mesh;
    what_ = what.str();
  }

  at::Tensor run(const at::Tensor& local, const Placement& from, const Placement& to) {
    from_ = from;
    to_ = to;
    return run_part(local, from, to);
  }

 private:
  at::Tensor run_part(const at::Tensor& local, const Placement& from, const Placement& to) const {
    if (from == to || parts_ == 1) return local;
    if (from.is_interleaved() || to.is_interleaved()) return run_on_atoms(local, from, to);
    const at::Tensor plain = local.resolve_neg().resolve_conj();
    if (plain.is_complex()) return moved_as_pairs(plain, from, to);
    return from.is_partial() ? moved_terms(plain, from, to) : moved(plain, from, to);
  }

  at::Tensor moved_terms(const at::Tensor& terms, const Placement& from,
                         const Placement& to) const {
    const auto dtype = dtype_of_reduction(terms.scalar_type(), what_);
    return moved(terms.to(dtype), from, to).to(terms.scalar_type());
  }

  // Along its atoms an interleaved cut is a plain one.
  at::Tensor run_on_atoms(const at::Tensor& local, const Placement& from,
                          const Placement& to) const {
    const bool both_cut = from.is_shard() && to.is_shard();
    if (both_cut &&
        (from.shard_dim() == to.shard_dim() || from.is_interleaved() == to.is_interleaved()))
      return run_part(run_part(local, from, Replicate{}), Replicate{}, to);
    const Shard cut = from.is_interleaved() ? from.shard() : to.shard();
    Step on_atoms = *this;
    on_atoms.shape_ = split_shape(shape_, cut);
    const at::Tensor split = local.reshape(split_shape(local.sizes().vec(), cut));
    const at::Tensor moved =
        on_atoms.run_part(split, along_atoms(from, cut.dim), along_atoms(to, cut.dim));
    return moved.flatten(cut.dim, cut.dim + 2);
  }

  // Backends know no complex numbers: they move as pairs of real ones.
  at::Tensor moved_as_pairs(const at::Tensor& local, const Placement& from,
                            const Placement& to) const {
    for (const Placement& placement : {from, to}) {
      const bool linear = !placement.is_partial() || placement.partial_op() == Partial::Op::kSum ||
                          placement.partial_op() == Partial::Op::kAvg;
      TORCH_CHECK_NOT_IMPLEMENTED(linear, what_, ": ", placement,
                                  " of complex numbers; only sum and avg are reduced");
    }
    Step pairs = *this;
    pairs.shape_.push_back(2);
    return at::view_as_complex(pairs.moved(at::view_as_real(local), from, to));
  }

  at::Tensor moved(const at::Tensor& local, const Placement& from, const Placement& to) const {
    if (from.is_shard() && to.is_shard())
      return all_to_all_shards(local, from.shard_dim(), to.shard_dim());
    if (from.is_partial() && to.is_shard())
      return reduce_shard(local, from.partial_op(), to.shard_dim());
    const at::Tensor whole = replicated(local, from);
    if (to.is_shard()) return own_chunk(whole, to.shard_dim()).clone(at::MemoryFormat::Contiguous);
    if (to.is_partial()) return own_term(whole, to.partial_op());
    return whole;
  }

  at::Tensor replicated(const at::Tensor& local, const Placement& from) const {
    if (from.is_shard()) return gather(local, from.shard_dim());
    if (from.is_partial()) return reduce(local, from.partial_op());
    return local;
  }

  at::Tensor own_chunk(const at::Tensor& whole, int64_t dim) const {
    const Chunk own = chunk_of(shape_[dim], parts_, index_);
    return whole.narrow(dim, own.offset, own.length);
  }

  at::Tensor own_term(const at::Tensor& whole, Partial::Op op) const {
    if (index_ == 0 || op == Partial::Op::kAvg || op == Partial::Op::kMin ||
        op == Partial::Op::kMax) {
      return whole.clone();
    }
    return at::full_like(whole, op == Partial::Op::kProduct ? 1 : 0);
  }

  at::Tensor gather(const at::Tensor& local, int64_t dim) const {
    const int64_t capacity = chunk_capacity(shape_[dim], parts_);
    const at::Tensor input = padded(local, dim, capacity).movedim(dim, 0).contiguous();
    auto rows = input.sizes().vec();
    rows[0] *= parts_;
    const at::Tensor output = at::empty(rows, input.options());
    if (output.numel() > 0) {
      tell(CollectiveKind::kAllGather, input);
      numbers_.send(
          [&] { collectives_.all_gather({.output = output, .input = input, .what = what_}); });
    }
    return output.narrow(0, 0, shape_[dim]).movedim(0, dim).contiguous();
  }

  at::Tensor reduce(const at::Tensor& local, Partial::Op op) const {
    at::Tensor sum = local.clone(at::MemoryFormat::Contiguous);
    if (sum.numel() > 0) {
      tell(CollectiveKind::kAllReduce, sum);
      numbers_.send(
          [&] { collectives_.all_reduce({.tensor = sum, .what = what_, .op = reduce_op(op)}); });
    }
    return averaged(std::move(sum), op, parts_);
  }

  at::Tensor reduce_shard(const at::Tensor& local, Partial::Op op, int64_t dim) const {
    const int64_t capacity = chunk_capacity(shape_[dim], parts_);
    const at::Tensor input = padded(local, dim, capacity * parts_).movedim(dim, 0).contiguous();
    auto rows = input.sizes().vec();
    rows[0] = capacity;
    const at::Tensor output = at::empty(rows, input.options());
    if (output.numel() > 0) {
      tell(CollectiveKind::kReduceScatter, input);
      numbers_.send([&] {
        collectives_.reduce_scatter(
            {.output = output, .input = input, .what = what_, .op = reduce_op(op)});
      });
    }
    const int64_t length = chunk_of(shape_[dim], parts_, index_).length;
    return averaged(output.narrow(0, 0, length).movedim(0, dim).contiguous(), op, parts_);
  }

  at::Tensor all_to_all_shards(const at::Tensor& local, int64_t from, int64_t to) const {
    const int64_t from_capacity = chunk_capacity(shape_[from], parts_);
    const int64_t to_capacity = chunk_capacity(shape_[to], parts_);
    at::Tensor input = padded(padded(local, from, from_capacity), to, to_capacity * parts_);
    input = input.unflatten(to, at::IntArrayRef{parts_, to_capacity}).movedim(to, 0).contiguous();
    const at::Tensor output = at::empty_like(input);
    if (output.numel() > 0) {
      tell(CollectiveKind::kAllToAll, input);
      numbers_.send(
          [&] { collectives_.all_to_all({.output = output, .input = input, .what = what_}); });
    }
    return output.movedim(0, from)
        .flatten(from, from + 1)
        .narrow(from, 0, shape_[from])
        .narrow(to, 0, chunk_of(shape_[to], parts_, index_).length)
        .contiguous();
  }

  void tell(CollectiveKind kind, const at::Tensor& input) const {
    if (!is_movement_heard()) return;
    note_movement({.operator_name = MovingOperator::current(),
                   .cause = CauseOfMovement::current(),
                   .kind = kind,
                   .mesh = mesh_,
                   .mesh_dim = mesh_dim_,
                   .from = from_,
                   .to = to_,
                   .shape = shape_,
                   .bytes = static_cast<int64_t>(input.nbytes())});
  }

  const DeviceMesh& mesh_;
  NumbersMoved& numbers_;
  int64_t mesh_dim_;
  Placement from_ = Replicate{}, to_ = Replicate{};  // of the whole step
  Collectives collectives_;
  int64_t parts_;
  int64_t index_;
  std::vector<int64_t> shape_;
  std::string what_;
};

// `tensor` with its dimensions in `order` in memory: steps make row-major parts, whatever
// the strides.
at::Tensor in_memory_order(const at::Tensor& tensor, const std::vector<int64_t>& order) {
  if (std::is_sorted(order.begin(), order.end())) return tensor;
  std::vector<int64_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[order[i]] = static_cast<int64_t>(i);
  return tensor.permute(order).contiguous().permute(inverse);
}

// The sequence of steps from one list of placements to another.
class Journey {
 public:
  // `moved`: the DTensor of that local tensor, where there is one.
  Journey(const DTensorSpec& from, at::Tensor local, const at::Tensor* moved)
      : spec_(from),
        placements_(from.placements()),
        local_(std::move(local)),
        moved_(moved),
        numbers_(NumbersOfMove::current(), local_.numel() > 0) {}

  at::Tensor run(const std::vector<Placement>& to) && {
    undo_inner_cuts(to);
    reduce_before_splitting(to);
    for (size_t m = 0; m < to.size(); ++m) move(m, to[m]);
    numbers_.check(spec_.mesh());
    return in_memory_order(local_, memory_order(spec_.shape(), spec_.stride()));
  }

 private:
  // A cut that lies inside another cut of the same tensor dimension must be undone before
  // the outer one changes; the innermost goes first.
  void undo_inner_cuts(const std::vector<Placement>& to) {
    for (size_t m = placements_.size(); m-- > 1;) {
      if (lies_inside_a_change(m, to)) move(m, Replicate{});
    }
  }

  bool lies_inside_a_change(size_t m, const std::vector<Placement>& to) const {
    if (!placements_[m].is_shard()) return false;
    const int64_t dim = placements_[m].shard_dim();
    for (size_t outer = 0; outer < m; ++outer) {
      const bool cuts_it = placements_[outer].is_shard(dim) || to[outer].is_shard(dim);
      if (cuts_it && placements_[outer] != to[outer]) return true;
    }
    return false;
  }

  // Terms that become whole anyway do so before the value is split into terms of another
  // kind, which need not commute.
  void reduce_before_splitting(const std::vector<Placement>& to) {
    const auto is_new_partial = [&](size_t m) {
      return to[m].is_partial() && to[m] != placements_[m];
    };
    bool splits = false;
    for (size_t m = 0; m < to.size(); ++m) splits = splits || is_new_partial(m);
    if (!splits) return;
    for (size_t m = 0; m < to.size(); ++m) {
      if (placements_[m].is_partial() && placements_[m] != to[m]) move(m, Replicate{});
    }
  }

  void move(size_t m, const Placement& to) {
    if (placements_[m] == to) return;
    local_ = Step(spec_.mesh(), static_cast<int64_t>(m), shape_without(m), moved_, numbers_)
                 .run(local_, placements_[m], to);
    placements_[m] = to;
  }

  std::vector<int64_t> shape_without(size_t m) const {
    auto others = placements_;
    others[m] = Replicate{};
    return local_shape(spec_.shape(), spec_.mesh().shape(), others, spec_.mesh().coordinate());
  }

  const DTensorSpec& spec_;
  std::vector<Placement> placements_;
  at::Tensor local_;
  const at::Tensor* moved_;
  NumbersMoved numbers_;
};

at::Tensor redistribute(const at::Tensor& local, const DTensorSpec& from,
                        const std::vector<Placement>& to, const at::Tensor* moved) {
  if (from.placements() == to) return local;
  // Bytes are sent, which are not the values while a conjugation or negation waits.
  return Journey(from, local.resolve_conj().resolve_neg(), moved).run(to);
}

// Atoms [own] of every block, dimensions in the order of memory.
at::Tensor part_along(const at::Tensor& whole, const Shard& cut, const Chunk& own) {
  if (cut.outer == 1) return whole.narrow(cut.dim, own.offset * cut.unit, own.length * cut.unit);
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
    const Chunk own = chunk_of(atoms_of(cut, part.size(cut.dim)), spec.mesh().size(mesh_dim),
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
  const NumbersOfMove numbers(meta_of(dtensor).numbers);
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
  const NewFromParameter origin(meta_of(dtensor).from_parameter, meta_of(dtensor).numbers);
  return make_dtensor(moved_part(dtensor, to), target);
}

at::Tensor whole_value(const at::Tensor& dtensor) {
  return moved_part(dtensor, spec_of(dtensor).replicated().placements());
}

at::Tensor reduce_partials(const at::Tensor& dtensor) {
  return redistribute_dtensor(dtensor, without_partials(spec_of(dtensor).placements()));
}

}  // namespace fsdp::internal
