#include "fully_shard/units/shard_placement.h"

#include "dtensor/layout/shard_layout.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/transport/comm_context.h"
#include "fully_shard/transport/row_codes.h"
#include "fully_shard/units/planned_owners.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

bool is_to_be_planned(const Shard& cut) {
  return cut.local_units == LocalUnits::of_owner(Owned::kPlanned);
}

// Whether a tensor-parallel style cuts that dimension, be it over one rank.
bool is_cut_by_style(const at::Tensor& tensor, int64_t dim) {
  const auto* const meta = find_meta(tensor);
  if (meta == nullptr) return false;
  const auto& placements = meta->spec.placements();
  return std::any_of(placements.begin(), placements.end(),
                     [dim](const Placement& placement) { return placement.is_shard(dim); });
}

// Parts of what a style cut differ in size between its ranks, which write cuts alike.
Shard written_simplest(const Shard& cut, const at::Tensor& tensor, int64_t ranks) {
  return is_cut_by_style(tensor, cut.dim) ? cut : simplest(cut, tensor.size(cut.dim), ranks);
}

// What is wrong with it; empty: nothing. The dimension of `cut` is not negative.
std::string misfit(const Shard& cut, const at::Tensor& part, int64_t ranks) {
  if (is_to_be_planned(cut)) return "";
  if (!is_well_formed(cut, ranks))
    return "expected a unit of 1 or more; of local_units numbers of 0 or more, not only 0, one for "
           "each of the " +
           std::to_string(ranks) + " ranks that shard; of an owner one of these";
  const int64_t size = part.size(cut.dim);
  if (!divides(cut, size))
    return "its units do not divide the " + std::to_string(size) + " elements of dimension " +
           std::to_string(cut.dim);
  return "";
}

Shard cut_from(const Placement& placement, const FoundParam& param, int64_t ranks, Outer outer,
               const ErrorContext& context) {
  const auto where = c10::str(context.caller, ": shard_placement_fn gave ", placement,
                              " for parameter '", param.path, "'");
  const auto& rank = context.rank;
  TORCH_CHECK_VALUE(placement.is_shard(), where, ", expected a Shard, RaggedShard or Owned", rank);
  Shard cut = placement.shard();
  const auto ndim = param.tensor.dim();
  if (cut.dim < 0) cut.dim += ndim;
  TORCH_CHECK_VALUE(cut.dim >= 0 && cut.dim < ndim, where, " of ", ndim, " dimensions", rank);
  TORCH_CHECK_NOT_IMPLEMENTED(cut.outer == 1, where, "; allowed are cuts without outer", rank);
  TORCH_CHECK_NOT_IMPLEMENTED(outer == Outer::kReplicate || !placement.is_interleaved(), where,
                              " with outer = kShardOptimizer, which cuts the parts once more; ",
                              "allowed there are Shard without unit", rank);
  const at::Tensor part = held_part(param.tensor);
  const auto why = misfit(cut, part, ranks);
  TORCH_CHECK_VALUE(why.empty(), where, " of shape ", param.tensor.sizes(), ": ", why, rank);
  if (is_to_be_planned(cut)) return cut;
  TORCH_CHECK_NOT_IMPLEMENTED(
      Placement(cut).can_lie_inside_a_cut() || !is_cut_by_style(param.tensor, cut.dim), where,
      ", whose dimension ", cut.dim, " tensor parallelism cuts; allowed there are Shard without ",
      "unit, and Owned", rank);
  return written_simplest(cut, param.tensor, ranks);
}

// Throws unless a row of `elements`, which messages call `row`, takes fewer than `limit`
// bytes.
void check_codec(const GatherCodec& codec, int64_t elements, int64_t limit,
                 const std::string& where, const std::string& row, const ErrorContext& context) {
  TORCH_CHECK_VALUE(codec.row_bytes && codec.encode && codec.decode, where,
                    ", which lacks row_bytes, encode or decode", context.rank);
  const auto bytes = codec.row_bytes(elements);
  TORCH_CHECK_VALUE(bytes > 0 && bytes < limit, where, ", of which ", row, " takes ", bytes,
                    " bytes; allowed are 1 to ", limit - 1, ", fewer than without it",
                    context.rank);
}

void check_gather_codec(const GatherCodec& codec, const FoundParam& param,
                        std::optional<at::ScalarType> param_dtype, const ErrorContext& context) {
  const auto where = c10::str(context.caller, ": gather_codec_fn gave '", codec.name,
                              "' for parameter '", param.path, "' of shape ", param.tensor.sizes());
  const auto dtype = param.tensor.scalar_type();
  TORCH_CHECK_VALUE(at::isFloatingType(dtype), where, " and dtype ", dtype,
                    ", allowed are floating ones", context.rank);
  const auto part = held_part(param.tensor);
  int64_t elements = 1;
  for (int64_t dim = param.cut.dim + 1; dim < part.dim(); ++dim) elements *= part.size(dim);
  check_codec(codec, elements,
              elements * static_cast<int64_t>(c10::elementSize(param_dtype.value_or(dtype))), where,
              c10::str("one index of dimension ", param.cut.dim), context);
}

void check_gradient_codec(const GatherCodec& codec, const char* stage,
                          const ErrorContext& context) {
  constexpr auto kElements = RowCodes::kPiece;
  check_codec(codec, kElements, 4 * kElements,
              c10::str(context.caller, ": gradient_codecs.", stage, " is '", codec.name, "'"),
              c10::str("a row of ", kElements, " gradients"), context);
}

}  // namespace

int64_t ranks_that_shard(const DeviceMesh& mesh) { return mesh.size(shard_mesh_dim(mesh)); }

void place_parameters(ManagedModules& managed, int64_t ranks, const FullyShardOptions& options,
                      const ErrorContext& context) {
  if (!options.shard_placement_fn) return;
  for (auto& param : managed.params) {
    if (param.is_tied_to_a_unit()) continue;
    const auto placement = options.shard_placement_fn(param.path, param.tensor);
    if (placement) param.cut = cut_from(*placement, param, ranks, options.outer, context);
  }
}

void choose_codecs(ManagedModules& managed, const FullyShardOptions& options,
                   const ErrorContext& context) {
  const auto& [shards, replicas, error_feedback] = options.gradient_codecs;
  if (shards) check_gradient_codec(*shards, "shards", context);
  if (replicas) check_gradient_codec(*replicas, "replicas", context);
  TORCH_CHECK_VALUE(!error_feedback || replicas, context.caller,
                    ": gradient_codecs.error_feedback is set without gradient_codecs.replicas, "
                    "whose error it feeds back",
                    context.rank);
  if (!options.gather_codec_fn) return;
  for (auto& param : managed.params) {
    if (param.is_tied_to_a_unit()) continue;
    if (held_part(param.tensor).numel() == 0) continue;
    param.codec = options.gather_codec_fn(param.path, param.tensor);
    if (param.codec)
      check_gather_codec(*param.codec, param, options.mp_policy.param_dtype, context);
  }
}

void plan_owners(ManagedModules& managed, int64_t ranks, std::vector<int64_t>& owned_bytes) {
  owned_bytes.resize(static_cast<size_t>(ranks), 0);
  std::vector<FoundParam*> planned;
  std::vector<int64_t> sizes;
  BytesByCoordinate bytes{.in_unit = std::vector<int64_t>(static_cast<size_t>(ranks), 0),
                          .in_owned = std::move(owned_bytes)};
  for (auto& param : managed.params) {
    if (param.is_tied_to_a_unit()) continue;
    // Of the whole, which is the same on all ranks of a style.
    const auto size = param.tensor.numel() * static_cast<int64_t>(param.tensor.element_size());
    if (is_to_be_planned(param.cut)) {
      planned.push_back(&param);
      sizes.push_back(size);
      continue;
    }
    const auto rows = std::max<int64_t>(param.tensor.size(param.cut.dim), 1);
    for (int64_t rank = 0; rank < ranks; ++rank)
      bytes.in_unit[static_cast<size_t>(rank)] += own_atoms(param.cut, rows, ranks, rank).length *
                                                  atom_size(param.cut, rows) * (size / rows);
  }
  const auto owners = planned_owners(sizes, bytes);
  for (size_t i = 0; i < planned.size(); ++i) {
    auto& cut = planned[i]->cut;
    cut.local_units = LocalUnits::of_owner(owners[i]);
    cut = written_simplest(cut, planned[i]->tensor, ranks);
  }
  owned_bytes = std::move(bytes.in_owned);
}

}  // namespace fsdp::internal
