// The groups that owe a reduction: a forward that records gradients touched them since
// their last one, or a backward without synchronisation did. In the order of the first
// such touch since the last backward; those that are owed from before it come first.
// Local.
#pragma once

#include <algorithm>
#include <vector>

namespace fsdp::internal {

template <class Group>
class Debts {
 public:
  void touched(Group group) {
    if (std::find(fresh_.begin(), fresh_.end(), group) != fresh_.end()) return;
    std::erase(old_, group);
    fresh_.push_back(group);
  }
  // A backward without synchronisation left gradients on the group.
  void left_unpaid(Group group) {
    if (!owes(group)) old_.push_back(group);
  }
  void paid(Group group) {
    std::erase(fresh_, group);
    std::erase(old_, group);
  }
  // A backward ended: what is still owed keeps no place among the next forward's touches.
  void backward_ended() {
    old_.insert(old_.end(), fresh_.begin(), fresh_.end());
    fresh_.clear();
  }
  std::vector<Group> in_order() const {
    auto groups = old_;
    groups.insert(groups.end(), fresh_.begin(), fresh_.end());
    return groups;
  }
  bool owes(Group group) const {
    return std::find(fresh_.begin(), fresh_.end(), group) != fresh_.end() ||
           std::find(old_.begin(), old_.end(), group) != old_.end();
  }

 private:
  std::vector<Group> fresh_, old_;
};

}  // namespace fsdp::internal
