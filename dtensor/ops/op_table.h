// What the library knows of LibTorch's operators on DTensors, one entry each: how they
// are sharded, what a rank does on its part, and what runs in their place. (PyTorch has
// the like in torch/distributed/tensor/_ops.) An operator without an entry runs on the
// whole value (run_on_whole.h), or is taken apart by its composite kernel.
//
// A family of operators has a pair of files in this folder, which registers its entries:
//
//   void add_softmax(OpTable& table) {
//     table.add("_softmax.", {.strategy = ..., .local_kernel = ...});
//   }
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
  // that is there: an operator is known in one place.
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
