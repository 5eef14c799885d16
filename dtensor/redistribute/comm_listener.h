// Listeners that are told of every collective of DTensors before it is issued, and may
// forbid it (PyTorch's CommDebugMode, in the library). Profilers see it as a range.
//
//   issue_comm(bytes, [&] { return CommEvent{...}; }, [&] { collectives.all_gather(...); });
#pragma once

#include "device_mesh/collectives/notice.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/internal/inherited.h"
#include "device_mesh/internal/profiler_range.h"
#include "dtensor/placement.h"

#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::internal {

enum class CommCause {
  kRule,      // an operator needs an operand elsewhere
  kWhole,     // an operator that cannot run on parts needs its operands whole
  kExchange,  // an operator sends a little instead of its operands
  kStyle,     // a plan asks for it
  kGradient,  // a gradient goes where its value, or its parameter, lies
  kBoundary,  // a plain tensor takes the value of a DTensor
  kRequest,   // redistribute(), full_tensor() or the value of an element was asked for
};

// One collective of this rank.
struct CommEvent {
  std::string operator_name;  // "aten::mm"; empty outside of operators
  CommCause cause;
  CollectiveKind kind;
  const DeviceMesh& mesh;
  int64_t mesh_dim;
  Placement from, to;          // along mesh_dim
  std::vector<int64_t> shape;  // of this rank's part without the cut along mesh_dim
  int64_t bytes;               // that this rank gives to the collective
};

const char* name_of(CollectiveKind kind);  // "all-gather"
// The index where dimensions have no names.
std::string name_of_dim(const DeviceMesh& mesh, int64_t dim);

// While it lives, `listener` hears of every event of this thread and of the backwards
// that it starts, before it happens; those that were there before hear of it first. What
// it throws forbids the collective: it must do so on every rank of the mesh, or on none.
// Local.
class CommListener {
 public:
  using Listener = std::function<void(const CommEvent&)>;

  explicit CommListener(Listener listener);
  CommListener(const CommListener&) = delete;
  CommListener& operator=(const CommListener&) = delete;

 private:
  friend void tell_comm_listeners(const CommEvent& event);
  void hear(const CommEvent& event) const;

  Listener listener_;
  const CommListener* before_;
  InheritedScope scope_;
};

// Why this thread moves data while one lives; the innermost counts. Rules, where there is
// none.
class CommCauseScope {
 public:
  explicit CommCauseScope(CommCause cause);
  ~CommCauseScope();
  CommCauseScope(const CommCauseScope&) = delete;
  CommCauseScope& operator=(const CommCauseScope&) = delete;

  static CommCause current();

 private:
  CommCause before_;
};

// The operator that runs on this thread while one lives.
class CommOperatorScope {
 public:
  // `name` outlives it.
  explicit CommOperatorScope(const std::string& name);
  ~CommOperatorScope();
  CommOperatorScope(const CommOperatorScope&) = delete;
  CommOperatorScope& operator=(const CommOperatorScope&) = delete;

  static std::string current();  // empty: none

 private:
  const std::string* before_;
  CommCause cause_before_;
};

// Of this thread.
bool has_comm_listener();
// Throws where a listener forbids the collective.
void tell_comm_listeners(const CommEvent& event);
// "all-gather over tp, Shard(1) -> Replicate()"
std::string range_name(const CommEvent& event);

// Issues `collective`, once listeners and profilers have heard of it. `event()` makes
// what they hear, and is called only where there is one.
template <std::invocable Event, std::invocable Collective>
void issue_comm(int64_t bytes, const Event& event, const Collective& collective) {
  if (has_comm_listener()) tell_comm_listeners(event());
  const ProfilerRange range(
      "redistribute", [&] { return range_name(event()); }, bytes);
  collective();
}

}  // namespace fsdp::internal
