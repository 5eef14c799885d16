// How LibTorch's operators run on DTensors, one entry each: how they are sharded, what a
// rank does on its part, and what runs in their place. (PyTorch has the like in
// torch/distributed/tensor/_ops.) An operator without an entry runs on the whole value
// (run_on_whole.h), or is taken apart by its composite kernel.
//
// A family of operators (families.h) has a file in this folder, which registers its
// entries:
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
// - dtensor/kernels/composites_on_whole.cc lists composite operators that read memory
//   themselves, and therefore run on the whole value.
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
// - on_demand/input_cast.cc lists operators whose inputs mixed precision does not cast:
//   derivatives, conversions, and operators on lists of tensors.
// - on_demand/entry_substitution.cc lists operators that are given registry entries as they
//   are: those that make a tensor of the same geometry, and to() where nothing is converted.
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
#include "dtensor/strategy/op_strategy.h"

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
  // for its common case, too (kernels/fast_pointwise.h). Throws c10::Error for one
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

}  // namespace fsdp::internal
