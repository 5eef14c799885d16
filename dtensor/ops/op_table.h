// How LibTorch's operators run on DTensors, one entry each: how they are sharded, what a
// rank does on its part, and what runs in their place. (PyTorch has the like in
// torch/distributed/tensor/_ops.) An operator without an entry runs on the whole value
// (run_by_strategy.h), or is taken apart by its composite kernel.
//
// A family of operators has a file of its name in this folder, which registers its
// entries (add_softmax() and its like, below):
//
//   void add_softmax(OpTable& table) {
//     table.add("_softmax.", {.strategy = ..., .local_kernel = ...});
//   }
//
// How an operator is sharded is known in this table and nowhere else. A few lists
// elsewhere know other things of operators by name. For DTensors:
//
// - dtensor/kernels/fast_pointwise.cc lists the elementwise operators that have kernels
//   without boxed arguments. It is compared with unboxed() at the start.
// - dtensor/kernels/view_replay.cc lists the views that have such kernels too. All other
//   views are found by their schemas.
// - dtensor/kernels/composites.cc lists composite operators that read memory themselves,
//   and therefore run on the whole value, and those of fused kernels.
// - dtensor/dispatch/implicit_replication.cc lists operators that do not read the values of
//   what stands beside their first operand, and optimizer steps. For these, plain operands
//   are not compared between ranks.
//
// For parameters of fully_shard:
//
// - on_demand/gate.cc lists views and operators on metadata, for which a parameter need not
//   be gathered, and operators that replace or resize a storage, which are refused.
// - on_demand/fast_gate.cc lists frequent operators, which pass the gate without boxed
//   arguments.
// - on_demand/gate_arguments.cc lists operators whose inputs mixed precision does not cast
//   (derivatives, conversions, and operators on lists of tensors), and those that are given
//   registry entries as they are: what makes a tensor of the same geometry, and to() where
//   nothing is converted.
//
// For tensor parallelism and deferred initialisation:
//
// - tensor_parallel/internal/parallel_style_operators.cc lists the operators at which the
//   style of a parameter acts, since they read it.
// - tensor_parallel/internal/parallel_gate.cc lists operators of layers that have no style,
//   whose inputs are compared between ranks in the first steps.
// - deferred_init/recorder.cc lists operators that read values, and are refused where there
//   are none yet.
// - deferred_init/replay.cc lists the operators that make memory without values.
#pragma once

#include "dtensor/dispatch/run_by_strategy.h"
#include "dtensor/strategy/op_schema.h"

#include <functional>
#include <set>
#include <string>
#include <unordered_map>

namespace fsdp::internal {

// Takes an OperatorCall whose arguments still hold DTensors and finishes it.
// `by_strategy` runs it by its entry's strategy; null for an entry without.
using OpHandler = std::function<void(OperatorCall& call, const StrategyKernel* by_strategy)>;

struct OpEntry {
  OpStrategy strategy = {};
  // Instead of the operator itself on this rank's parts.
  LocalKernel local_kernel = nullptr;
  // Instead of running by its strategy: what hands out a C++ value, draws, or looks at
  // values.
  OpHandler handler = nullptr;
  // What it writes has nothing of what it was: copy_, fill_.
  bool overwrites = false;
};

class OpTable {
 public:
  // `name` without namespace: "mm." for the overload without a name, "softmax.int", or
  // "add" for every overload that has no entry of its own. Throws c10::Error for a name
  // that is there: how an operator is sharded is said once.
  void add(const std::string& name, OpEntry entry);
  // Under `name` and under its in-place form, "add.Tensor" and "add_.Tensor".
  void add_with_in_place(const std::string& name, const OpEntry& entry);

  // `name`, which has an entry and stands here with its overload, has an unboxed kernel
  // for its common case, too (kernels/fast_pointwise.cc). Throws c10::Error for one
  // without an entry.
  void add_unboxed(const std::string& name);
  bool is_unboxed(const std::string& name) const { return unboxed_.contains(name); }
  const std::set<std::string>& unboxed() const { return unboxed_; }

  // Null for none. `name` with its overload.
  const OpEntry* find(const std::string& name) const;
  const std::unordered_map<std::string, OpEntry>& entries() const { return entries_; }

 private:
  std::unordered_map<std::string, OpEntry> entries_;
  std::set<std::string> unboxed_;
};

// That of the process, with all families.
const OpTable& op_table();

// The families of operators that run on DTensors by entries of their own, each in the
// file of its name.

// log_sigmoid, prelu and glu, and their gradients.
void add_activations(OpTable& table);

// Scaled dot product attention, fused, on CPUs, its gradient, and the choice of the
// kernel.
void add_attention(OpTable& table);

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

// Fused optimizer steps: one operator updates all parameters and states.
void add_fused_optimizers(OpTable& table);

// Operators whose result is a value on the host and no tensor: item(), equal() and
// allclose(); and the operators behind &, | and ^, which are taken apart like allclose().
void add_host_values(OpTable& table);

// Reading and writing at indices (index, index_select, gather, index_put, index_fill,
// index_copy, index_add, scatter, scatter_add), and the gradients of views that read a
// part.
void add_index(OpTable& table);

// Products of matrices and vectors: mm, bmm, mv, dot, vdot, addmm, baddbmm.
void add_matmul(OpTable& table);

// nll_loss and nll_loss2d, and their gradients.
void add_nll_loss(OpTable& table);

// norm and linalg_vector_norm, and _foreach_norm: the norms of many tensors.
void add_norm(OpTable& table);

// Batch, group and layer norms (native_batch_norm and its like), and their gradients.
void add_normalization(OpTable& table);

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

// softmax and log_softmax, and their gradients.
void add_softmax(OpTable& table);

// Pooling and interpolation, and their gradients.
void add_spatial(OpTable& table);

// var, std, var_mean and std_mean.
void add_variance(OpTable& table);

// Views but reshaping ones: transpose, permute, slice, split, expand and their like,
// repeat, detach, view(dtype) and as_strided; and views in place: squeeze_, unsqueeze_,
// t_ and transpose_.
void add_view(OpTable& table);

// Operators that need the whole of the dimension that they work along: cumsum, sort,
// flip, roll, tril, logsumexp, median, kthvalue and their like.
void add_whole_dim(OpTable& table);

}  // namespace fsdp::internal
