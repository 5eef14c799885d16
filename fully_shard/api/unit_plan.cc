#include "fully_shard/unit_plan.h"

#include <ostream>

namespace fsdp {

std::string to_string(const UnitPlan& plan) {
  std::string text;
  for (const auto& unit : plan.units) {
    text += (unit.path.empty() ? "(root)" : unit.path) + ": " + unit.type + ", " +
            std::to_string(unit.numel) + " elements\n";
    for (const auto& [parameter, placement] : unit.placements)
      text += "  " + parameter + ": " + to_string(placement) + "\n";
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const UnitPlan& plan) { return out << to_string(plan); }

}  // namespace fsdp
