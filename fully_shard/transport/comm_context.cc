#include "fully_shard/transport/comm_context.h"

#include "fully_shard/params/param_group.h"
#include "fully_shard/transport/c10d_transport.h"
#include "fully_shard/transport/last_issued.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace fsdp::internal {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<const void*, std::weak_ptr<CommContext>> contexts;  // by process group
};

Registry& registry() {
  static auto& instance = *new Registry();  // leaked: groups may die after static destruction began
  return instance;
}

}  // namespace

std::shared_ptr<CommContext> CommContext::find(const DeviceMesh& mesh) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().contexts.find(mesh.group(0).get());
  return found == registry().contexts.end() ? nullptr : found->second.lock();
}

std::shared_ptr<CommContext> CommContext::of(const DeviceMesh& mesh) {
  if (auto context = find(mesh)) return context;
  auto context = std::make_shared<CommContext>(mesh);  // collective: not under the lock
  std::lock_guard lock(registry().mutex);
  std::erase_if(registry().contexts, [](const auto& item) { return item.second.expired(); });
  registry().contexts[mesh.group(0).get()] = context;
  return context;
}

CommContext::CommContext(const DeviceMesh& mesh)
    : transport_(make_c10d_transport(mesh, 0)),
      rank_(transport_->rank()),
      world_(transport_->world()),
      backward_(*this) {}

void CommContext::note_failure(const std::exception& error) {
  const auto* rich = dynamic_cast<const c10::Error*>(&error);
  if (failure_.empty()) failure_ = rich != nullptr ? rich->what_without_backtrace() : error.what();
}

Stamp CommContext::stamp_next(const ParamGroup& group, CollectiveKind kind, int64_t bytes) {
  TORCH_CHECK(failure_.empty(), "unit '", group.name(),
              "' can not communicate: an earlier collective of its mesh failed (", failure_,
              "). Destroy the process group and start anew on every rank (rank ", rank_, ")");
  const auto stamp = issue_order_.next(group.unit_number(), kind, bytes);
  record_issued(kind, group.name(), stamp.sequence(), rank_);
  return stamp;
}

void CommContext::account(int64_t Counters::*counter, int64_t bytes) {
  counters_.*counter += bytes;
  counters_.peak_bytes =
      std::max(counters_.peak_bytes,
               counters_.unsharded_bytes + counters_.staging_bytes + counters_.gradient_bytes);
}

std::string CommContext::describe(const Stamp& stamp) const {
  const auto& groups = schedule_.groups();
  const auto unit = std::find_if(groups.begin(), groups.end(), [&stamp](const auto* group) {
    return group->unit_number() == stamp.unit;
  });
  return c10::str(stamp.kind() == CollectiveKind::kAllGather ? "all-gather" : "reduce-scatter",
                  " of unit '",
                  unit == groups.end() ? c10::str("number ", stamp.unit) : (*unit)->name(),
                  "' (sequence ", stamp.sequence(), ")");
}

void CommContext::check_stamps(const Stamp& mine, const std::vector<Stamp>& all,
                               const std::string& unit) const {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    TORCH_CHECK(
        all[rank] == mine, "collectives are out of order: rank ", rank, " issued the ",
        describe(all[rank]), " where rank ", rank_, " issued the ", describe(mine),
        all[rank].unit == mine.unit ? ", after a different history" : "",
        ". Every rank must touch the sharded units in the same order; unit '", unit,
        "' was not changed on this rank. The other ranks of the mesh fail alike or time out.");
  }
}

}  // namespace fsdp::internal

namespace fsdp {

Counters counters(const DeviceMesh& mesh) {
  const auto context = internal::CommContext::find(mesh);
  return context ? context->counters() : Counters{};
}

void reset_peak(const DeviceMesh& mesh) {
  if (const auto context = internal::CommContext::find(mesh)) {
    context->counters().peak_bytes = 0;
    context->account(&Counters::staging_bytes, 0);
  }
}

}  // namespace fsdp
