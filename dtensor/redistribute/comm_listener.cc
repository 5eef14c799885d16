#include "dtensor/redistribute/comm_listener.h"

#include <sstream>
#include <utility>

namespace fsdp::internal {
namespace {

thread_local CommCause current_cause = CommCause::kRule;
thread_local const std::string* current_operator = nullptr;

const CommListener* last_listener() {
  return static_cast<const CommListener*>(inherited(Inherited::kCommListener));
}

}  // namespace

CommListener::CommListener(Listener listener)
    : listener_(std::move(listener)),
      before_(last_listener()),
      scope_(Inherited::kCommListener, this) {}

void CommListener::hear(const CommEvent& event) const {
  if (before_ != nullptr) before_->hear(event);
  listener_(event);
}

CommCauseScope::CommCauseScope(CommCause cause) : before_(std::exchange(current_cause, cause)) {}

CommCauseScope::~CommCauseScope() { current_cause = before_; }

CommCause CommCauseScope::current() { return current_cause; }

// An operator within a request moves by its own rules.
CommOperatorScope::CommOperatorScope(const std::string& name)
    : before_(std::exchange(current_operator, &name)),
      cause_before_(std::exchange(current_cause, CommCause::kRule)) {}

CommOperatorScope::~CommOperatorScope() {
  current_operator = before_;
  current_cause = cause_before_;
}

std::string CommOperatorScope::current() {
  return current_operator == nullptr ? std::string() : *current_operator;
}

bool has_comm_listener() { return last_listener() != nullptr; }

const char* name_of(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllGather:
      return "all-gather";
    case CollectiveKind::kReduceScatter:
      return "reduce-scatter";
    case CollectiveKind::kAllReduce:
      return "all-reduce";
    case CollectiveKind::kAllToAll:
      return "all-to-all";
    case CollectiveKind::kBroadcast:
      return "broadcast";
  }
  return "";
}

std::string name_of_dim(const DeviceMesh& mesh, int64_t dim) {
  return mesh.dim_names().empty() ? std::to_string(dim)
                                  : mesh.dim_names()[static_cast<size_t>(dim)];
}

void tell_comm_listeners(const CommEvent& event) {
  if (const auto* const listener = last_listener()) listener->hear(event);
}

std::string range_name(const CommEvent& event) {
  std::ostringstream name;
  name << name_of(event.kind) << " over " << name_of_dim(event.mesh, event.mesh_dim) << ", "
       << event.from << " -> " << event.to;
  return name.str();
}

}  // namespace fsdp::internal
