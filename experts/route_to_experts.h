// Mixtures of experts whose experts lie on the ranks of a mesh (expert parallelism):
// tokens go to the ranks of their experts, and what these make of them comes back.
//
//   auto [weights, chosen] = router(x).softmax(-1).topk(2, -1);  // x: [tokens, width]
//   auto y = fsdp::route_to_experts(x, {.experts = chosen, .weights = weights, .count = 8},
//                                   mesh["ep"], [&](const auto& rows, const auto& counts) {
//     // Rows of this rank's experts in turn; up: [8, hidden, width], down: [8, width, hidden].
//     const auto hidden = torch::silu(fsdp::grouped_linear(rows, counts, up));
//     return fsdp::grouped_linear(hidden, counts, down);
//   });
//
// Over a mesh of data parallel ranks, such as {2, 4}, {"efsdp", "ep"}:
//
//   fsdp::parallelize_module(model, mesh["ep"], {{"mixture*.experts", fsdp::ExpertParallel{}}});
//   fsdp::fully_shard(mixture->experts, mesh["efsdp"]);
//   fsdp::fully_shard(model, mesh.flatten({"efsdp", "ep"}, "dp")["dp"]);
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace fsdp {

// Rows of `rows` go to the ranks of a 1-D mesh, the first to[0] of them to rank 0, the
// next to[1] to rank 1; gives those that come, from[0] of rank 0 first. Differentiable:
// gradients go back the same way, on every rank alike, so what it gives of floating rows
// always requires one while graphs are recorded. Collective over the mesh, and its
// backward too; the sizes are sent before, for which a device is waited for. Throws
// ValueError on all ranks alike for sizes that do not fit, with the ranks.
[[nodiscard]] FSDP_API at::Tensor all_to_all(const at::Tensor& rows, const std::vector<int64_t>& to,
                                             const std::vector<int64_t>& from,
                                             const DeviceMesh& mesh);

// Where tokens go.
struct ExpertRouting {
  at::Tensor experts;  // integers [tokens, k]: which of all experts
  at::Tensor weights;  // [tokens, k], by which what the experts give is added up
  int64_t count = 0;   // of all experts
};

// What this rank's experts make of their tokens. `rows`: [n, width], those of its first
// expert, then of the next. `counts`: int64 [experts of this rank] on the CPU, how many
// each has, which may be none. Gives [n, anything].
using ExpertFunction = std::function<at::Tensor(const at::Tensor& rows, const at::Tensor& counts)>;

// Of experts that are modules of their own, all on this rank: calls each(expert, rows)
// with each of them and its rows, which may be none. What comes back must be as wide for
// all.
//
//   auto experts = fsdp::for_each_expert([&](int64_t expert, const at::Tensor& rows) {
//     return layers[expert]->as<torch::nn::Linear>()->forward(rows);
//   });
[[nodiscard]] FSDP_API ExpertFunction
for_each_expert(std::function<at::Tensor(int64_t expert, const at::Tensor& rows)> each);

// For each of this rank's `tokens`, [tokens, width], the sum of what its experts give,
// times their weights: [tokens, anything]. Ranks of a 1-D mesh have the experts as a
// tensor [count, ...] that is cut Shard{0} over it has its rows. Every rank may have
// another number of tokens, and none. Differentiable in tokens, weights, and what
// `experts` computes with; its gradients are sums over the tokens of all ranks.
//
// Where `tokens` is a DTensor that is cut along its first dimension (context
// parallelism), each rank routes its own, the routing is a DTensor too or whole, and the
// result is a DTensor cut alike. What `experts` computes with counts as parameters of
// fully_shard do beside such a batch: an average over the ranks is one over batches.
//
// Sends tokens * k rows of the width to experts, as many back, and as much in the
// backward, but what stays on its rank; and before that the numbers of rows, for which a
// device is waited for. Collective over the mesh, and its backward too. Throws ValueError
// on all ranks alike where one has an expert out of range, and where ranks differ in k,
// width or dtype. Ranks that differ in count get the error of collectives that differ.
[[nodiscard]] FSDP_API at::Tensor route_to_experts(const at::Tensor& tokens,
                                                   const ExpertRouting& routing,
                                                   const DeviceMesh& mesh,
                                                   const ExpertFunction& experts);

// The same where all experts are on this rank: sends nothing. Local.
[[nodiscard]] FSDP_API at::Tensor route_to_experts(const at::Tensor& tokens,
                                                   const ExpertRouting& routing,
                                                   const ExpertFunction& experts);

// Of the rows of each expert the product with its matrix, x Wᵀ: [n, in] to [n, out].
// `counts`: as an ExpertFunction gets them; their sum is n. `weights`: [experts, out,
// in], of this rank's experts, or a DTensor over one mesh dimension that is cut along its
// first, of which this rank's part counts. Differentiable; experts without rows get
// zeros. Local. Throws ValueError for sizes that do not fit.
[[nodiscard]] FSDP_API at::Tensor grouped_linear(const at::Tensor& rows, const at::Tensor& counts,
                                                 const at::Tensor& weights);

}  // namespace fsdp
