#include "dtensor/redistribute/movement.h"

#include <utility>

namespace fsdp::internal {
namespace {

thread_local const MovementListener* last_listener = nullptr;
thread_local MovementCause current_cause = MovementCause::kRule;
thread_local const std::string* current_operator = nullptr;

}  // namespace

MovementListener::MovementListener(Listener listener)
    : listener_(std::move(listener)), before_(std::exchange(last_listener, this)) {}

MovementListener::~MovementListener() { last_listener = before_; }

void MovementListener::hear(const Movement& movement) const {
  if (before_ != nullptr) before_->hear(movement);
  listener_(movement);
}

CauseOfMovement::CauseOfMovement(MovementCause cause)
    : before_(std::exchange(current_cause, cause)) {}

CauseOfMovement::~CauseOfMovement() { current_cause = before_; }

MovementCause CauseOfMovement::current() { return current_cause; }

// An operator within a request moves by its own rules.
MovingOperator::MovingOperator(const std::string& name)
    : before_(std::exchange(current_operator, &name)),
      cause_before_(std::exchange(current_cause, MovementCause::kRule)) {}

MovingOperator::~MovingOperator() {
  current_operator = before_;
  current_cause = cause_before_;
}

std::string MovingOperator::current() {
  return current_operator == nullptr ? std::string() : *current_operator;
}

bool is_movement_heard() { return last_listener != nullptr; }

void note_movement(const Movement& movement) {
  if (last_listener != nullptr) last_listener->hear(movement);
}

}  // namespace fsdp::internal
