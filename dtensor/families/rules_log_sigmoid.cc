// log_sigmoid_forward(self) -> result, buffer. On CPUs the buffer is as large as the
// result, on other devices it is empty.
#include "dtensor/families/rules.h"
#include "dtensor/internal/run_by_ways.h"
#include "dtensor/ways/table.h"

namespace fsdp::internal {
namespace {

OperatorWays with_empty_buffer(const OperatorWays& with_buffer) {
  return {.ways =
              [of = with_buffer.ways](const CallGeometry& call) {
                auto ways = of(call);
                for (Way& way : ways) way.results[1] = Replicate{};
                return ways;
              },
          .results =
              [of = with_buffer.results](const CallGeometry& call) {
                return std::vector<ResultGeometry>{of(call)[0], contiguous({0})};
              }};
}

void log_sigmoid_forward_rule(OperatorCall& call) {
  const OperatorWays& ways = *find_ways("log_sigmoid_forward.");
  static const WaysKernel on_cpus(ways, call.handle());
  static const WaysKernel elsewhere(with_empty_buffer(ways), call.handle());
  (call.argument(0).toTensor().is_cpu() ? on_cpus : elsewhere).run(call);
}

}  // namespace

void add_log_sigmoid_rules(RuleTable& table) {
  table["log_sigmoid_forward."] = log_sigmoid_forward_rule;
}

}  // namespace fsdp::internal
