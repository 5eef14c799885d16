#include "optim/internal/newton_schulz.h"

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

}  // namespace fsdp::internal
