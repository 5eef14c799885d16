#include "examples/run_report/unit_table.h"

namespace examples::run_report {
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

std::vector<UnitRow> unit_table(const std::vector<UnitFacts>& units,
                                const std::vector<RankStep>& steps) {
  std::vector<UnitRow> rows;
  for (const auto& unit : units) {
    auto& row = rows.emplace_back(UnitRow{unit});
    if (steps.empty()) continue;
    for (const auto& step : steps) add(row, step);
    for (auto* const sum : {&row.gathers, &row.prefetched, &row.unused, &row.gathered_bytes,
                            &row.exposed_seconds, &row.unsharded_share})
      *sum /= static_cast<double>(steps.size());
  }
  return rows;
}

}  // namespace examples::run_report
