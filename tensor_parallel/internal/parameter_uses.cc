#include "tensor_parallel/internal/parameter_uses.h"

#include <stdexcept>

namespace fsdp::internal {
namespace {

[[noreturn]] void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

// The cut of dimension `dim`.
Placement cut(const ParameterRole& role, int64_t dim, int64_t sections, int64_t unit) {
  if (sections < 1 || unit < 1) {
    refuse("sections and unit must be at least 1, got " + std::to_string(sections) + " and " +
           std::to_string(unit));
  }
  const auto ndim = static_cast<int64_t>(role.shape.size());
  const int64_t size = dim < ndim ? role.shape[static_cast<size_t>(dim)] : 0;
  if (dim >= ndim || size % (sections * unit) != 0) {
    refuse("dimension " + std::to_string(dim) + " of size " + std::to_string(size) +
           " is not a multiple of sections * unit = " + std::to_string(sections * unit));
  }
  return Shard{dim, sections, unit};
}

[[noreturn]] void refuse_role(const char* style, const ParameterRole& role) {
  refuse(std::string(style) +
         " knows the weight and bias of Linear, and of modules of one's own "
         "with a weight of two dimensions, and the weight of Embedding; not the " +
         role.leaf + " of a " + role.module_type +
         ". Name the parameter and give it a ShardParameter");
}

[[noreturn]] void refuse_input(const std::string& style, const ParameterRole& role,
                               const std::string& known) {
  refuse(style + " would change nothing for a " + role.module_type + ": it is for " + known);
}

struct ParameterOfStyle {
  const ParameterRole& role;

  ParallelParameter operator()(const ColwiseParallel& style) const {
    if (role.kind == ModuleKind::kEmbedding && role.leaf == "weight") {
      return {
          cut(role, 1, style.sections, style.unit),
          {.product = {}, .lookup = Use{.input = {}, .output = style.output_layout}, .norm = {}}};
    }
    if (role.kind == ModuleKind::kOther || role.kind == ModuleKind::kNorm)
      refuse_role("ColwiseParallel", role);
    if (role.kind == ModuleKind::kAttention) return heads(style);
    const Placement rows = cut(role, 0, style.sections, style.unit);
    if (role.leaf == "bias") return {rows, {}};
    if (role.leaf != "weight") refuse_role("ColwiseParallel", role);
    return {rows,
            {.product = Use{.input = Replicate{}, .output = style.output_layout},
             .lookup = {},
             .norm = {}}};
  }

  // Between heads, in each of the projections that a parameter packs.
  ParallelParameter heads(const ColwiseParallel& style) const {
    const bool is_packed = role.leaf.starts_with("in_proj_");
    if (is_packed && style.sections != 3) {
      refuse(
          "packs query, key and value, so a cut would go across their borders: give it "
          "ColwiseParallel{.sections = 3}");
    }
    const int64_t unit = style.unit > 1 ? style.unit : role.head_width;
    const bool is_weight = role.leaf.ends_with("_proj_weight");
    const auto last = static_cast<int64_t>(role.shape.size()) - 1;
    ParallelParameter result{cut(role, is_weight ? 0 : last, is_packed ? 3 : 1, unit), {}};
    if (is_weight) result.uses.product = Use{.input = Replicate{}, .output = {}};
    return result;
  }

  ParallelParameter operator()(const RowwiseParallel& style) const {
    const Placement output = style.output_layout.value_or(Replicate{});
    if (role.kind == ModuleKind::kEmbedding && role.leaf == "weight") {
      return {cut(role, 0, 1, style.unit),
              {.product = {}, .lookup = Use{.input = {}, .output = output}, .norm = {}}};
    }
    if (role.kind == ModuleKind::kProduct && role.leaf == "bias") return {Replicate{}, {}};
    const bool is_table = role.kind == ModuleKind::kProduct || role.kind == ModuleKind::kEmbedding;
    if (!is_table || role.leaf != "weight") refuse_role("RowwiseParallel", role);
    return {cut(role, 1, 1, style.unit),
            {.product = Use{.input = Shard{-1, 1, style.unit}, .output = output},
             .lookup = {},
             .norm = {}}};
  }

  ParallelParameter operator()(const SequenceParallel& style) const {
    if (role.kind != ModuleKind::kNorm) {
      refuse_input("SequenceParallel", role,
                   "LayerNorm and norms of one's own. A Linear takes the cut sequence from its "
                   "output_layout, or as it comes with ReplicateParallel");
    }
    return {Replicate{},
            {.product = {},
             .lookup = {},
             .norm = Use{.input = Shard{style.sequence_dim}, .output = {}}}};
  }

  ParallelParameter operator()(const ReplicateParallel& style) const {
    if (!style.input_layout.has_value()) return {Replicate{}, {}};
    if (role.kind != ModuleKind::kProduct && role.kind != ModuleKind::kNorm)
      refuse_input("the input_layout of ReplicateParallel", role, "Linear and norms");
    const Use use{.input = style.input_layout, .output = {}};
    return {Replicate{}, {.product = use, .lookup = {}, .norm = use}};
  }

  ParallelParameter operator()(const ShardParameter& style) const {
    const Placement& placement = style.placement;
    if (placement.is_partial()) refuse("a parameter can not be Partial");
    if (!placement.is_shard()) return {placement, {}};
    const Placement counted =
        counted_from_start(placement, static_cast<int64_t>(role.shape.size()));
    const Shard& shard = counted.shard();
    return {cut(role, shard.dim, shard.outer, shard.unit), {}};
  }

  ParallelParameter operator()(const ExpertParallel& /*style*/) const {
    if (role.shape.empty()) refuse("it has no dimension of experts");
    return {
        Shard{0}, {.product = {}, .lookup = {}, .norm = {}, .is_own = true}, Batches::kOnePerRank};
  }
};

std::optional<Use> either(const std::optional<Use>& one, const std::optional<Use>& other) {
  if (one.has_value() && other.has_value() && *one != *other)
    refuse("it is tied, and its styles want different inputs or outputs of one operator");
  return one.has_value() ? one : other;
}

}  // namespace

ParallelParameter parallel_parameter(const ParallelStyle& style, const ParameterRole& role) {
  return std::visit(ParameterOfStyle{role}, style);
}

ParallelStyle style_of_output_projection(const ColwiseParallel& attention, int64_t head_width) {
  return RowwiseParallel{.output_layout = attention.output_layout,
                         .unit = attention.unit > 1 ? attention.unit : head_width};
}

ParallelParameter tied(const ParallelParameter& one, const ParallelParameter& other) {
  if (one.placement != other.placement) {
    refuse("it is tied, and its styles cut it as " + to_string(one.placement) + " and as " +
           to_string(other.placement));
  }
  return {one.placement,
          {.product = either(one.uses.product, other.uses.product),
           .lookup = either(one.uses.lookup, other.uses.lookup),
           .norm = either(one.uses.norm, other.uses.norm),
           .is_own = one.uses.is_own || other.uses.is_own},
          one.batches};
}

Placement counted_from_start(const Placement& placement, int64_t ndim) {
  if (!placement.is_shard() || placement.shard_dim() >= 0) return placement;
  return placement.along(placement.shard_dim() + ndim);
}

}  // namespace fsdp::internal
