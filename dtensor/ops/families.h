// The families of operators that run on DTensors by entries of their own (op_table.h),
// each in the file of its name.
#pragma once

namespace fsdp::internal {

class OpTable;

// log_sigmoid, prelu and glu, and their gradients.
void add_activations(OpTable& table);

// Scaled dot product attention, fused, on CPUs, its gradient, and the choice of the
// kernel.
void add_attention(OpTable& table);

// native_batch_norm, and its gradient.
void add_batch_norm(OpTable& table);

// cat and stack.
void add_cat(OpTable& table);

// Convolutions, and their gradients.
void add_convolution(OpTable& table);

// Copies: clone, to(dtype), copy_ and set_.
void add_copy(OpTable& table);

// Losses of elements, and their gradients: mse_loss, smooth_l1_loss, huber_loss,
// soft_margin_loss, binary_cross_entropy, with logits too.
void add_elementwise_loss(OpTable& table);

// embedding, and the gradient of its table.
void add_embedding(OpTable& table);

// Extrema along a dimension with their places in it: max and min with `dim`, argmax,
// argmin and topk. Those without places (max and min of all elements, amax, amin,
// aminmax) are in reduction.cc.
void add_extrema(OpTable& table);

// New tensors made from a DTensor: zeros_like, new_zeros and their like; and eye.
void add_factory(OpTable& table);

// _foreach_ operators, which do to every tensor of a list what an elementwise operator
// does; and _foreach_max.
void add_foreach(OpTable& table);

// _foreach_norm: the norms of many tensors.
void add_foreach_norm(OpTable& table);

// Fused optimizer steps: one operator updates all parameters and states.
void add_fused_optimizers(OpTable& table);

// native_group_norm, and its gradient.
void add_group_norm(OpTable& table);

// Operators whose result is a value on the host and no tensor: item(), equal() and
// allclose(); and the operators behind &, | and ^, which are taken apart like allclose().
void add_host_values(OpTable& table);

// Reading and writing at indices (index, index_select, gather, index_put, index_fill,
// index_copy, index_add), and the gradients of views that read a part.
void add_index(OpTable& table);

// native_layer_norm, and its gradient.
void add_layer_norm(OpTable& table);

// Products of matrices and vectors: mm, bmm, mv, dot, vdot, addmm, baddbmm.
void add_matmul(OpTable& table);

// nll_loss and nll_loss2d, and their gradients.
void add_nll_loss(OpTable& table);

// norm and linalg_vector_norm.
void add_norm(OpTable& table);

// Elementwise operators: arithmetic, comparisons, activations of one result and their
// gradients.
void add_pointwise(OpTable& table);

// Operators that draw random numbers, and the gradients of those that drop or leak.
void add_random(OpTable& table);

// Sums, means, products, any and all, and extrema without their places (the others:
// extrema.cc).
void add_reduction(OpTable& table);

// view(size) and its like, which reshape.
void add_reshape(OpTable& table);

// scatter and scatter_add.
void add_scatter(OpTable& table);

// softmax and log_softmax, and their gradients.
void add_softmax(OpTable& table);

// Pooling and interpolation, and their gradients.
void add_spatial(OpTable& table);

// var, std, var_mean and std_mean.
void add_variance(OpTable& table);

// Views but reshaping ones: transpose, permute, slice, split, expand and their like,
// repeat, detach, view(dtype) and as_strided.
void add_view(OpTable& table);

// Views in place: squeeze_, unsqueeze_, t_ and transpose_.
void add_view_in_place(OpTable& table);

// Operators that need the whole of the dimension that they work along: cumsum, sort,
// flip, roll, tril, logsumexp, median, kthvalue and their like.
void add_whole_dim(OpTable& table);

}  // namespace fsdp::internal
