#include "dtensor/redistribute/redistribute.h"

#include "dtensor/redistribute/interleaved_shards.h"
#include "dtensor/redistribute/redistribute_step.h"
#include "dtensor/redistribute/scalar_agreement.h"
#include "dtensor/strategy/redistribute_plan.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/alias.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

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

// `moved`: the DTensor of that local tensor, where there is one.
at::Tensor redistribute(const at::Tensor& local, const DTensorSpec& from,
                        const std::vector<Placement>& to, const at::Tensor* moved) {
  if (from.placements() == to) return local;
  // Bytes are sent, which are not the values while a conjugation or negation waits.
  at::Tensor part = local.resolve_conj().resolve_neg();
  ScalarAgreement scalars(ScalarHashScope::current(), part.numel() > 0);
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
  const ScalarHashScope scalars(meta_of(dtensor).scalars);
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
