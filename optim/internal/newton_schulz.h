// Newton-Schulz iteration towards the nearest semi-orthogonal matrix, as torch.optim.Muon
// has it: a quintic whose coefficients give steep slopes at zero, so that singular values
// end near one (K. Jordan et al., "Muon: An optimizer for hidden layers in neural
// networks", 2024).
#pragma once

#include "optim/internal/matrices.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

struct NewtonSchulz {
  double a = 3.4445, b = -4.7750, c = 2.0315;
  double eps = 1e-7;  // the least Frobenius norm that is divided by
  int64_t steps = 5;
};

// Of each matrix in `stack`, any shape of `matrices` behind one another, bf16 and plain:
// bf16 of the same shape. One matrix per call of an operator, so that the bits do not
// depend on which others are there. Local; does not change `stack`.
at::Tensor orthogonalized(const at::Tensor& stack, const Matrices& matrices,
                          const NewtonSchulz& iteration);

}  // namespace fsdp::internal
