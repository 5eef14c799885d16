#include "optim/internal/orthogonalize.h"

#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "optim/muon.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>

namespace fsdp::internal {
namespace {

at::Tensor orthogonalized_matrix(const at::Tensor& matrix, const NewtonSchulz& iteration) {
  const bool is_tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = is_tall ? matrix.t() : matrix;
  x = x.div(x.norm().clamp(iteration.eps));
  for (int64_t step = 0; step < iteration.steps; ++step) {
    const at::Tensor gram = x.mm(x.t());
    const at::Tensor update = at::addmm(gram, gram, gram, iteration.b, iteration.c);
    x = at::addmm(x, update, x, iteration.a);
  }
  return is_tall ? x.t() : x;
}

}  // namespace

at::Tensor orthogonalized(const at::Tensor& stack, const Matrices& matrices,
                          const NewtonSchulz& iteration) {
  if (stack.numel() == 0) return stack;
  const at::Tensor each = stack.reshape({-1, matrices.rows, matrices.columns});
  at::Tensor directions = at::empty(each.sizes(), each.options());
  for (int64_t i = 0; i < each.size(0); ++i)
    directions.select(0, i).copy_(orthogonalized_matrix(each.select(0, i), iteration));
  return directions.view(stack.sizes());
}

namespace {

at::Tensor in_bf16(const at::Tensor& part) { return part.to(at::kBFloat16).contiguous(); }

// Of a plain tensor, of one that is replicated, and where every rank has whole matrices.
bool is_whole_here(const ToOrthogonalize& item) {
  const auto* const meta = find_meta(item.like);
  return meta == nullptr || are_whole_on_all_ranks(meta->spec.layout(), item.matrices);
}

// `stack`: all matrices of the item, or those that this rank has.
at::Tensor direction_of(const ToOrthogonalize& item, const at::Tensor& stack,
                        MuonCounters& counters) {
  auto matrices = matrices_of(item.like.sizes().vec(), item.matrices);
  const auto elements = matrices.rows * matrices.columns;
  matrices.count = elements > 0 ? stack.numel() / elements : 0;
  counters.matrices += matrices.count;
  counters.work += newton_schulz_cost(matrices);
  return orthogonalized(stack, matrices, item.iteration);
}

}  // namespace

void orthogonalize(const std::vector<ToOrthogonalize>& items,
                   c10::function_ref<at::Tensor(size_t)> update_of,
                   c10::function_ref<void(size_t, const at::Tensor&)> apply, MuonCounters& counters,
                   int64_t bucket_bytes) {
  std::vector<size_t> cut;  // by position among what travels
  std::vector<OwnedItem> travelling;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto& item = items[i];
    if (!is_whole_here(item)) {
      cut.push_back(i);
      travelling.push_back(
          {.like = item.like,
           .cost = newton_schulz_cost(matrices_of(item.like.sizes().vec(), item.matrices)),
           .sent_as = at::kBFloat16});
      continue;
    }
    const at::Tensor update = update_of(i);
    const at::Tensor direction = direction_of(item, in_bf16(held_part(update)), counters);
    apply(i, is_dtensor(update) ? make_dtensor(direction, spec_of(update)) : direction);
  }
  const OwnerBuckets buckets(std::move(travelling), bucket_bytes);
  const auto sent =
      buckets.run("step of Muon", std::vector<bool>(cut.size(), true),
                  {.part_of = [&](size_t k) { return in_bf16(held_part(update_of(cut[k]))); },
                   .compute =
                       [&](size_t k, const at::Tensor& whole) {
                         return direction_of(items[cut[k]], whole, counters);
                       },
                   .apply =
                       [&](size_t k, const at::Tensor& part) {
                         apply(cut[k], make_dtensor(part, spec_of(items[cut[k]].like)));
                       }});
  counters.exchanges += sent.exchanges;
  counters.received_bytes += sent.received_bytes;
}

}  // namespace fsdp::internal
