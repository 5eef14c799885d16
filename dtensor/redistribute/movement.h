// Who wants to know of data that DTensors move between ranks, or to forbid it.
#pragma once

#include "device_mesh/collectives/stamp.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/placement.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::internal {

enum class MovementCause {
  kRule,      // an operator needs an operand elsewhere
  kWhole,     // an operator that cannot run on parts needs its operands whole
  kExchange,  // an operator sends a little instead of its operands
  kStyle,     // a plan asks for it
  kGradient,  // a gradient goes where its value, or its parameter, lies
  kBoundary,  // a plain tensor takes the value of a DTensor
  kRequest,   // redistribute(), full_tensor() or the value of an element was asked for
};

// One collective of this rank.
struct Movement {
  std::string operator_name;  // "aten::mm"; empty outside of operators
  MovementCause cause;
  CollectiveKind kind;
  const DeviceMesh& mesh;
  int64_t mesh_dim;
  Placement from, to;          // along mesh_dim
  std::vector<int64_t> shape;  // of this rank's part without the cut along mesh_dim
  int64_t bytes;               // that this rank gives to the collective
};

// While it lives, `listener` hears of every movement of this thread, before it happens;
// those that were there before hear of it first. What it throws forbids the movement: it
// must do so on every rank of the mesh, or on none. Local.
class MovementListener {
 public:
  using Listener = std::function<void(const Movement&)>;

  explicit MovementListener(Listener listener);
  ~MovementListener();
  MovementListener(const MovementListener&) = delete;
  MovementListener& operator=(const MovementListener&) = delete;

 private:
  friend void note_movement(const Movement& movement);
  void hear(const Movement& movement) const;

  Listener listener_;
  const MovementListener* before_;
};

// Why this thread moves data while one lives; the innermost counts. Rules, where there is
// none.
class CauseOfMovement {
 public:
  explicit CauseOfMovement(MovementCause cause);
  ~CauseOfMovement();
  CauseOfMovement(const CauseOfMovement&) = delete;
  CauseOfMovement& operator=(const CauseOfMovement&) = delete;

  static MovementCause current();

 private:
  MovementCause before_;
};

// The operator that runs on this thread while one lives.
class MovingOperator {
 public:
  // `name` outlives it.
  explicit MovingOperator(const std::string& name);
  ~MovingOperator();
  MovingOperator(const MovingOperator&) = delete;
  MovingOperator& operator=(const MovingOperator&) = delete;

  static std::string current();  // empty: none

 private:
  const std::string* before_;
  MovementCause cause_before_;
};

// Whether somebody listens: note_movement() does nothing otherwise.
bool is_movement_heard();
void note_movement(const Movement& movement);

}  // namespace fsdp::internal
