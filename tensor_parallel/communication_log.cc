#include "tensor_parallel/communication_log.h"

#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/differentiable.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <map>
#include <sstream>

namespace fsdp {
namespace {

using internal::CommCause;
using internal::CommEvent;

CommunicationCause public_cause(CommCause cause) {
  switch (cause) {
    case CommCause::kRule:
    case CommCause::kWhole:
      return CommunicationCause::kRule;
    case CommCause::kExchange:
      return CommunicationCause::kExchange;
    case CommCause::kStyle:
      return CommunicationCause::kStyle;
    case CommCause::kGradient:
      return CommunicationCause::kGradient;
    case CommCause::kBoundary:
      return CommunicationCause::kBoundary;
    case CommCause::kRequest:
      return CommunicationCause::kRequest;
  }
  return CommunicationCause::kRule;
}

const char* name_of(CommunicationCause cause) {
  switch (cause) {
    case CommunicationCause::kRule:
      return "rule";
    case CommunicationCause::kExchange:
      return "exchange";
    case CommunicationCause::kStyle:
      return "style";
    case CommunicationCause::kGradient:
      return "gradient";
    case CommunicationCause::kBoundary:
      return "boundary";
    case CommunicationCause::kRequest:
      return "request";
  }
  return "";
}

Communication communication(const CommEvent& event) {
  return {.operator_name = event.operator_name,
          .collective = internal::name_of(event.kind),
          .mesh_dim = internal::name_of_dim(event.mesh, event.mesh_dim),
          .from = event.from,
          .to = event.to,
          .shape = event.shape,
          .bytes = event.bytes,
          .cause = public_cause(event.cause),
          .in_backward = internal::inside_backward()};
}

void forbid_what_nobody_asked_for(const CommEvent& event) {
  const auto cause = public_cause(event.cause);
  const bool unasked = cause == CommunicationCause::kRule || cause == CommunicationCause::kBoundary;
  TORCH_CHECK_VALUE(!unasked, "RedistributionPolicy: explicit, but ",
                    to_string(communication(event)),
                    ". Give the plan a style that moves it, or call redistribute() before (rank ",
                    event.mesh.rank(), "; every rank of the mesh sees this error)");
}

}  // namespace

std::string to_string(const Communication& each) {
  std::ostringstream out;
  out << each.collective << " over " << each.mesh_dim << ", " << each.from << " -> " << each.to
      << " of " << c10::IntArrayRef(each.shape) << ", " << each.bytes
      << " bytes: " << (each.operator_name.empty() ? "no operator" : each.operator_name) << ", "
      << name_of(each.cause) << ", " << (each.in_backward ? "backward" : "forward");
  return out.str();
}

struct CommunicationLog::State {
  std::vector<Communication> entries = {};
  internal::CommListener listener{
      [this](const CommEvent& event) { entries.push_back(communication(event)); }};
};

CommunicationLog::CommunicationLog() : state_(std::make_unique<State>()) {}
CommunicationLog::~CommunicationLog() = default;

const std::vector<Communication>& CommunicationLog::entries() const { return state_->entries; }

int64_t CommunicationLog::bytes() const {
  int64_t sum = 0;
  for (const auto& each : entries()) sum += each.bytes;
  return sum;
}

void CommunicationLog::clear() { state_->entries.clear(); }

std::string CommunicationLog::text() const {
  struct Total {
    int64_t count = 0, bytes = 0;
  };
  std::map<std::string, Total> totals;
  std::ostringstream out;
  for (const auto& each : entries()) {
    out << to_string(each) << "\n";
    auto& total = totals[name_of(each.cause)];
    ++total.count;
    total.bytes += each.bytes;
  }
  for (const auto& [cause, total] : totals)
    out << cause << ": " << total.count << " collectives, " << total.bytes << " bytes\n";
  return out.str();
}

struct RedistributionPolicy::Guard {
  internal::CommListener listener{forbid_what_nobody_asked_for};
};

RedistributionPolicy::RedistributionPolicy(Redistribution allowed)
    : guard_(allowed == Redistribution::kExplicit ? std::make_unique<Guard>() : nullptr) {}
RedistributionPolicy::~RedistributionPolicy() = default;

}  // namespace fsdp
