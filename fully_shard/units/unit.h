// The units (PyTorch's FSDPState): a Unit for each fully_shard call, what it was asked
// for and where it stands among the others; and the Root that all units of a tree share.
#pragma once

#include "fully_shard/communicate.h"
#include "fully_shard/policies.h"
#include "fully_shard/schedule/schedule.h"
#include "fully_shard/schedule/unit_tree.h"
#include "fully_shard/transport/accounts.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace c10 {
struct Event;
}
namespace torch::nn {
class Module;
}

namespace fsdp::internal {

// The dtype of buffers (MixedPrecisionPolicy::buffer_dtype): what a unit's modules
// compute with, and what each buffer had before, which is what checkpoints save.
//
//   UnitBuffers buffers;
//   buffers.take(found);              // floating ones that no other unit has
//   buffers.cast(at::kBFloat16);
//   buffers.cast(std::nullopt);       // as they were
//
// Buffers are cast in place: members, registry and handles taken before see it. What lies
// on the meta device is left until it has values. Local; different threads may use
// different buffers.

// What a buffer had before its unit cast it; of any other tensor its dtype.
at::ScalarType own_dtype(const at::Tensor& tensor);
// The tensor itself, or a copy in its own dtype.
at::Tensor in_own_dtype(const at::Tensor& tensor);

class UnitBuffers {
 public:
  // A buffer goes to the first unit that takes it; DTensors and what is not floating go
  // to none. Holds them weakly.
  void take(const std::vector<at::Tensor>& buffers);
  // Unset: each gets its own dtype back.
  void cast(std::optional<at::ScalarType> dtype) const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::vector<WeakTensor> buffers_;
};

class FSDPParamGroup;

// Writes through raw pointers bypass the gate, and are lost when their group is emptied.
// With DebugOptions::write_checks they are noticed there, by comparing this rank's part
// of the unsharded copy with its shard. Emptying happens where nothing may throw
// (destructors, an aborted backward), so the error waits here for the next place that
// may: a touch of any group of the root, reshard(), or the end of a backward.
class RawWrites {
 public:
  // `parameter` was emptied and had changed without a mark. The first one is kept.
  void note(const std::string& parameter) {
    if (!parameter_) parameter_ = parameter;
  }
  // Throws once for what was noted. Local: a rank notices writes to its own part only.
  void raise(int64_t global_rank);

 private:
  std::optional<std::string> parameter_;
};

// What belongs to one root and the units below it: the schedule, the counters, the
// groups, and whether the next backward is the last before the gradients are wanted
// (PyTorch's FSDPStateContext). When a root gets an ancestor, the ancestor's Root takes
// all over. Used by one thread at a time.
class Root {
 public:
  using Groups = std::map<UnitId, FSDPParamGroup*>;

  Schedule& schedule() { return schedule_; }
  Accounts& accounts() { return accounts_; }
  RawWrites& raw_writes() { return raw_writes_; }

  // Of the units that have one.
  const Groups& groups() const { return groups_; }
  FSDPParamGroup* group_of(UnitId unit) const;  // null where it has none
  void add_group(UnitId unit, FSDPParamGroup& group) { groups_[unit] = &group; }
  void remove_group(UnitId unit) noexcept;

  bool is_last_backward() const { return is_last_backward_; }
  void set_is_last_backward(bool is_last) { is_last_backward_ = is_last; }

  // The group whose touches need nothing; null for none, or one of another tree.
  FSDPParamGroup* ready_group() const { return ready_group_; }
  void set_ready_group(FSDPParamGroup& group) { ready_group_ = &group; }

  // The next gather waits for `event`.
  void gather_after(std::shared_ptr<c10::Event> event) { gather_after_ = std::move(event); }
  // What the coming gather waits for; null for nothing.
  std::shared_ptr<c10::Event> take_gather_after() { return std::exchange(gather_after_, nullptr); }

  // True at the first call: a change of order is told once.
  bool tell_of_order_change() { return !std::exchange(told_of_order_change_, true); }

  void absorb(Root& other);

 private:
  Schedule schedule_;
  Accounts accounts_;
  RawWrites raw_writes_;
  Groups groups_;
  FSDPParamGroup* ready_group_ = nullptr;
  bool is_last_backward_ = true;
  bool told_of_order_change_ = false;
  std::shared_ptr<c10::Event> gather_after_;
};

// What the user sends in the transport's place; empty: the transport.
struct CustomCollectives {
  Communicate all_gather = {}, reduce_scatter = {};
};

// Whether a SummonFullParams shows the unit in the registry, and what becomes of what is
// written meanwhile. The same on every rank.
enum class Summoned : uint8_t { kNo, kKeepsWrites, kDropsWrites };

// One fully_shard call. Its place in the tree and its group are kept consistent here;
// what was asked for are plain fields, which FSDPModule's setters change.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  explicit Unit(UnitPolicy asked);
  ~Unit();
  Unit(const Unit&) = delete;
  // Puts the root `child`, with all below it, below `parent`.
  static void adopt(const std::shared_ptr<Unit>& child, const std::shared_ptr<Unit>& parent);

  const UnitId id;
  // Shared with all units of the tree that this one is in.
  const std::shared_ptr<Root>& root() const { return root_; }
  // The nearest enclosing unit; null for a root.
  std::shared_ptr<Unit> parent() const { return parent_.lock(); }
  std::vector<std::shared_ptr<Unit>> children() const;  // that live
  bool has_children() const { return !children_.empty(); }

  // What fully_shard was applied to.
  using Modules = std::vector<std::weak_ptr<torch::nn::Module>>;
  const Modules& modules() const { return modules_; }
  void add_module(std::weak_ptr<torch::nn::Module> module);

  // Owned by the parameters; null without parameters or once they died.
  FSDPParamGroup* group() const { return group_; }
  // The group is the unit's from now on, and in its root's list.
  void attach(FSDPParamGroup& group);
  void detach_group() noexcept;

  std::string name;  // path of its first module from the outermost unit; "" for a root
  UnitPolicy policy;
  c10::Device device = c10::kCPU;  // where its modules compute
  MixedPrecisionPolicy precision = {};
  GradientCodecs gradient_codecs = {};
  OffloadPolicy offload = {};
  Outer outer = Outer::kReplicate;
  CustomCollectives custom = {};
  UnitBuffers buffers;  // with precision.buffer_dtype: those that the unit casts
  Summoned summoned = Summoned::kNo;

  bool is_summoned() const { return summoned != Summoned::kNo; }
  // No enclosing unit whose module lives.
  bool is_root() const;
  bool is_ancestor_of(const Unit& other) const;
  const std::string& display_name() const;

  // Gives the buffers the dtype that the policies ask for now.
  void cast_buffers() const;

  // Plain parameters that the user wants neither sharded nor reduced, here and in the
  // units below.
  void ignore(const std::vector<at::Tensor>& tensors);
  bool ignores(const at::Tensor& tensor) const;

 private:
  void join(const std::shared_ptr<Root>& joined);
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  std::shared_ptr<Root> root_;
  std::weak_ptr<Unit> parent_;
  std::vector<std::weak_ptr<Unit>> children_;
  Modules modules_;
  FSDPParamGroup* group_ = nullptr;
  std::unordered_map<const c10::TensorImpl*, WeakTensor> ignored_;  // whose addresses it keeps
};

// `unit` and all units below it, parents first.
void for_each_unit_below(Unit& unit, const std::function<void(Unit&)>& visit);

// Which modules are units: attaches a Unit to a module from outside. Process-wide,
// thread-safe. Holds modules weakly and verifies them at every look-up, since a new
// module may reuse a dead one's address.

// Null unless `module` is a unit.
std::shared_ptr<Unit> find_unit(const torch::nn::Module& module);
// REQUIRES: owned by a shared_ptr and no unit yet.
void attach_unit(torch::nn::Module& module, std::shared_ptr<Unit> unit);

}  // namespace fsdp::internal
