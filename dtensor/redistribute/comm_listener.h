// Listeners that are told of every collective of DTensors before it is issued, and may
// forbid it (PyTorch's CommDebugMode, in the library).
#pragma once

#include "device_mesh/collectives/stamp.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/internal/inherited.h"
#include "dtensor/placement.h"

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
  friend void note_comm_event(const CommEvent& event);
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

// Whether somebody listens: note_comm_event() does nothing otherwise.
bool has_comm_listener();
void note_comm_event(const CommEvent& event);

}  // namespace fsdp::internal
