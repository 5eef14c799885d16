// Joining tensors: cat along a dimension, where it is cut as blocks behind one another if
// the cuts go together, else gathered, and stack along a new one. All parts come to lie
// as the one with the most shards; terms of a Partial stay terms where all parts are.
// Plain parts count as replicated; beside registry entries in a backward only, where they
// are the zeros for outputs of split and unbind that nothing used.
#include "dtensor/dtensor.h"
#include "dtensor/families/rules.h"
#include "dtensor/internal/block_views.h"
#include "dtensor/internal/differentiable.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/note_redistribution.h"
#include "dtensor/internal/place_operands.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/whole_dims.h"

#include <ATen/ops/cat.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

// LibTorch lets an empty vector stand in any list.
bool is_placeholder(const at::Tensor& tensor) { return tensor.dim() == 1 && tensor.numel() == 0; }

int64_t shard_count(const at::Tensor& tensor) {
  const auto& placements = spec_of(tensor).placements();
  return std::count_if(placements.begin(), placements.end(),
                       [](const auto& p) { return p.is_shard(); });
}

const at::Tensor& most_sharded(const std::vector<at::Tensor>& tensors) {
  const at::Tensor* leader = nullptr;
  for (const at::Tensor& tensor : tensors) {
    if (!is_dtensor(tensor)) continue;
    if (leader == nullptr || shard_count(tensor) > shard_count(*leader)) leader = &tensor;
  }
  return *leader;
}

// The leader's placements; Partial only where every tensor is the same Partial.
std::vector<Placement> common_placements(const OperatorCall& call,
                                         const std::vector<at::Tensor>& tensors) {
  const DTensorSpec& leader = spec_of(most_sharded(tensors));
  if (!inside_backward()) check_entries(call, tensors, leader.mesh());
  auto placements = leader.placements();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(!is_dtensor(tensor) || spec_of(tensor).mesh() == leader.mesh(),
                      call.description(),
                      " has operands on different meshes; bring them to one mesh with "
                      ".full_tensor() and fsdp::distribute_tensor. Gradients on several meshes are "
                      "clipped by fsdp::clip_grad_norm_, not LibTorch's (rank ",
                      leader.mesh().rank(), ")");
    for (size_t m = 0; m < placements.size(); ++m) {
      const bool same = is_dtensor(tensor) && spec_of(tensor).placements()[m] == placements[m];
      if (placements[m].is_partial() && !same) placements[m] = Replicate{};
    }
  }
  return placements;
}

// This rank's part of tensor number `operand`. Collective where it must move, which is
// noted.
at::Tensor placed_part(const OperatorCall& call, size_t operand, const at::Tensor& tensor,
                       const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  if (is_placeholder(tensor)) return is_dtensor(tensor) ? local_of(tensor) : tensor;
  if (!is_dtensor(tensor))
    return local_part(tensor, {mesh, placements, tensor.sizes().vec(), tensor.strides().vec()});
  const DTensorSpec& from = spec_of(tensor);
  if (must_move(from, placements))
    note_redistribution(call, operand, from, placements, NotedRedistribution::Cause::kNoRule);
  return redistribute_local(local_of(tensor), from, placements);
}

std::vector<at::Tensor> local_parts(const OperatorCall& call,
                                    const std::vector<at::Tensor>& tensors, const DeviceMesh& mesh,
                                    const std::vector<std::vector<Placement>>& placements) {
  std::vector<at::Tensor> locals;
  for (size_t i = 0; i < tensors.size(); ++i)
    locals.push_back(placed_part(call, i, tensors[i], mesh, placements[i]));
  return locals;
}

// Where the blocks of cut tensors come to lie behind one another: the result's placements
// and those of every tensor. None where they do not go together as blocks.
struct Blocks {
  std::vector<Placement> result;
  std::vector<std::vector<Placement>> parts;
};

std::optional<Blocks> joined_blocks(const std::vector<at::Tensor>& tensors,
                                    const DTensorSpec& leader, int64_t dim, int64_t length) {
  const auto cut_dim = static_cast<size_t>(dim);
  auto whole = placements_around(leader, length, {dim, 0, leader.shape()[cut_dim]});
  if (!leader.is_cut(dim) || !whole.has_value()) return std::nullopt;
  Blocks blocks{.result = std::move(*whole), .parts = {}};
  auto shape = leader.shape();
  shape[cut_dim] = length;
  const DTensorSpec joined = leader.with_shape(std::move(shape)).with_placements(blocks.result);
  int64_t start = 0;
  for (const at::Tensor& tensor : tensors) {
    const int64_t own = is_placeholder(tensor) ? 0 : tensor.size(dim);
    auto part = placements_of_range(joined, {dim, start, own});
    if (!part.has_value()) return std::nullopt;
    blocks.parts.push_back(std::move(*part));
    start += own;
  }
  return blocks;
}

int64_t joined_length(const std::vector<at::Tensor>& tensors, int64_t dim) {
  int64_t length = 0;
  for (const at::Tensor& tensor : tensors) length += is_placeholder(tensor) ? 0 : tensor.size(dim);
  return length;
}

void cat_rule(OperatorCall& call) {
  const auto tensors = call.argument(0).toTensorVector();
  const at::Tensor& leader = most_sharded(tensors);
  const int64_t dim = c10::maybe_wrap_dim(call.argument(1).toInt(), leader.dim());
  const DeviceMesh mesh = spec_of(leader).mesh();
  const DTensorSpec common = spec_of(leader).with_placements(common_placements(call, tensors));
  auto shape = leader.sizes().vec();
  shape[static_cast<size_t>(dim)] = joined_length(tensors, dim);
  auto placements = placements_whole_along(common, {dim});
  if (auto blocks = joined_blocks(tensors, common, dim, shape[static_cast<size_t>(dim)])) {
    placements = std::move(blocks->result);
    call.argument(0) = local_parts(call, tensors, mesh, blocks->parts);
  } else {
    call.argument(0) = local_parts(call, tensors, mesh, {tensors.size(), placements});
  }
  auto results = call.run();
  call.finish(make_dtensor(results[0].toTensor(),
                           DTensorSpec(mesh, std::move(placements), std::move(shape))));
}

// cat of what has one more dimension.
void stack_rule(OperatorCall& call) {
  const auto tensors = call.argument(0).toTensorVector();
  const int64_t dim = c10::maybe_wrap_dim(call.argument(1).toInt(), tensors[0].dim() + 1);
  std::vector<at::Tensor> rows;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.sizes() == tensors[0].sizes(), call.description(),
                      ": tensors of one shape expected");
    rows.push_back(tensor.unsqueeze(dim));
  }
  call.finish(at::cat(rows, dim));
}

}  // namespace

void add_cat_rules(RuleTable& table) {
  table["cat."] = cat_rule;
  table["stack."] = stack_rule;
}

}  // namespace fsdp::internal
