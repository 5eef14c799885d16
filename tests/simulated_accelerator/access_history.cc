#include "tests/simulated_accelerator/access_history.h"

namespace fsdp::testing::simulated {

std::vector<std::string> AccessHistory::note(const Access& access, const ItemName& item,
                                             const Clock& known) {
  std::vector<std::string> unordered;
  const auto is_ordered = [&](const ItemName& before) {
    return before.position.queue == item.position.queue || known.contains(before.position);
  };
  // What is ordered before this access, and conflicts with all that this one does not
  // conflict with itself, tells nothing more.
  const auto is_replaced = [&](const Past& past) {
    return (access.writes || !past.access.writes) && access.covers(past.access);
  };
  std::erase_if(past_, [&](const Past& past) {
    if (!past.access.overlaps(access)) return false;
    if (is_ordered(past.item)) return is_replaced(past);
    if (past.access.writes || access.writes) {
      unordered.push_back(past.item.text() + " and " + item.text());
    }
    return false;
  });
  past_.push_back({access, item});
  return unordered;
}

}  // namespace fsdp::testing::simulated
