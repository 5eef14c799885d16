#include "dtensor/internal/note_redistribution.h"

#include "dtensor/internal/operator_call.h"

#include <utility>

namespace fsdp::internal {
namespace {

thread_local const RedistributionListener* current_listener = nullptr;

}  // namespace

RedistributionListener::RedistributionListener(Listener listener)
    : listener_(std::move(listener)), before_(std::exchange(current_listener, this)) {}

RedistributionListener::~RedistributionListener() { current_listener = before_; }

void note_redistribution(const OperatorCall& call, size_t operand, const DTensorSpec& from,
                         const std::vector<Placement>& to, NotedRedistribution::Cause cause) {
  if (current_listener == nullptr) return;
  current_listener->hear(
      {.operator_name = call.name(), .operand = operand, .from = from, .to = to, .cause = cause});
}

}  // namespace fsdp::internal
