// Looking up rows of a table of which each rank has some, as of a vocabulary. The result
// is terms, as embedding's is; its gradient is added up for this rank's rows only, where
// autograd's formula makes one of the whole table.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

// Whether `table` is a DTensor of one mesh dimension that cuts its rows, and `indices`
// are the same on all ranks.
bool has_cut_rows(const at::Tensor& table, const at::Tensor& indices);

// embedding(table, indices, padding_idx, scale_grad_by_freq). Differentiable twice.
// REQUIRES: has_cut_rows(). Its backward is collective over the mesh where the gradient
// that arrives is cut or terms.
at::Tensor look_up_rows(const at::Tensor& table, const at::Tensor& indices, int64_t padding_idx,
                        bool scale_grad_by_freq);

}  // namespace fsdp::internal
