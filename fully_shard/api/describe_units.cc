#include "fully_shard/describe_units.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/module_ref.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/rendezvous/presence.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/transport/transport.h"
#include "fully_shard/units/unit.h"

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace fsdp {
namespace {

using internal::FSDPParamGroup;
using internal::IssueLog;
using internal::Unit;

std::vector<std::shared_ptr<IssueLog>> logs_of(const FSDPParamGroup& group) {
  std::vector<std::shared_ptr<IssueLog>> logs;
  for (int64_t dim = 0; dim < group.info().mesh().ndim(); ++dim)
    logs.push_back(internal::collectives_of(group.info().mesh(), dim).log());
  return logs;
}

// The sequence number of the last collective on its mesh that names the unit.
std::string last_operation(const FSDPParamGroup& group) {
  const auto named = internal::in_words(group.info().issue({}));
  std::string last;
  for (const auto& log : logs_of(group)) {
    for (const auto& operation : log->recent_operations()) {
      if (operation.what.ends_with(named))
        last = operation.what.substr(0, operation.what.find(' ')) + " " +
               std::to_string(operation.sequence);
    }
  }
  return last.empty() ? "none" : last;
}

void describe_group(std::ostream& out, FSDPParamGroup& group) {
  const auto full = group.unsharded().layout().bytes(internal::Arrangement::kCommon);
  const auto& state = group.unsharded().state();
  out << (group.shards().has_values() ? to_string(state.state()) : "without values")
      << (state.is_held() ? " and held" : "") << ", " << group.params().size() << " parameters, "
      << group.shards().held_bytes() << " bytes of shards, " << full << " unsharded"
      << (group.gradients().keeps_gradients() ? ", gradients waiting" : "");
}

// What to do about a unit in a loop over time.
void advise(std::ostream& out, FSDPParamGroup& group) {
  const auto& count = group.unsharded().gather_count();
  if (!count.is_often()) return;
  out << "; gathered " << count.most()
      << " times between two ends of a backward: a unit in a loop stays gathered with "
         "reshard_after_forward = false and set_reshard_after_backward(false)";
}

void describe_unit(std::ostream& out, const Unit& unit) {
  out << unit.display_name() << ": ";
  if (unit.group() == nullptr) {
    out << "no parameters of its own\n";
    return;
  }
  describe_group(out, *unit.group());
  out << (unit.policy.reshard_after_forward.value_or(!unit.is_root()) ? ", reshards after forward"
                                                                      : "")
      << "; last: " << last_operation(*unit.group());
  advise(out, *unit.group());
  out << "\n";
}

void describe_last_operations(std::ostream& out, const IssueLog& log) {
  constexpr size_t kShown = 64;
  const auto operations = log.recent_operations();
  if (operations.empty()) return;
  out << "collectives issued last by rank " << log.global_rank() << " among "
      << internal::ranks_text(log.ranks()) << ":\n";
  const size_t left_out = operations.size() - std::min(operations.size(), kShown);
  for (size_t i = left_out; i < operations.size(); ++i) {
    const auto& operation = operations[i];
    out << "  " << operation.sequence;
    if (operation.lane != 0) out << " of side group " << operation.lane;
    out << ": " << operation.what << ", " << operation.bytes << " bytes\n";
  }
}

}  // namespace

std::string describe_units(ModuleRef module) {
  std::ostringstream out;
  std::vector<std::shared_ptr<IssueLog>> logs;
  for (const auto& handle : fsdp_modules(internal::given_module("describe_units", module))) {
    const auto& unit = *internal::unit_of(handle);
    internal::await_failed_backward(unit);
    describe_unit(out, unit);
    if (unit.group() == nullptr) continue;
    for (auto& log : logs_of(*unit.group())) {
      if (std::find(logs.begin(), logs.end(), log) == logs.end()) logs.push_back(std::move(log));
    }
  }
  for (const auto& log : logs) describe_last_operations(out, *log);
  return out.str();
}

}  // namespace fsdp
