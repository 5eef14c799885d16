#include "programs/trainer/report/page/unit_table.h"

namespace programs::run_report {
namespace {

void add(UnitRow& row, const RankStep& step) {
  for (const auto& gather : step.gathers) {
    if (gather.of != row.unit.name) continue;
    ++row.gathers;
    if (gather.is_prefetch) ++row.prefetched;
    if (!gather.is_used) ++row.unused;
    row.gathered_bytes += static_cast<double>(gather.bytes);
    row.exposed_seconds += gather.waited;
  }
  for (const auto& span : step.unsharded) {
    if (span.of == row.unit.name) row.unsharded_share += (span.end - span.begin) / step.seconds;
  }
  if (!step.gathers.empty() && step.gathers.front().of == row.unit.name) row.is_first = true;
}

}  // namespace

UnitTable::UnitTable(const std::vector<UnitFacts>& units) {
  for (const auto& unit : units) sums_.push_back({unit});
}

void UnitTable::add(const RankStep& step) {
  ++steps_;
  for (auto& row : sums_) run_report::add(row, step);
}

std::vector<UnitRow> UnitTable::rows() const {
  auto rows = sums_;
  if (steps_ == 0) return rows;
  for (auto& row : rows) {
    for (auto* const sum : {&row.gathers, &row.prefetched, &row.unused, &row.gathered_bytes,
                            &row.exposed_seconds, &row.unsharded_share})
      *sum /= static_cast<double>(steps_);
  }
  return rows;
}

}  // namespace programs::run_report
