// The groups whose reduction is pending: a forward that records gradients touched them
// since their last one, or a backward without synchronisation did. In the order of the
// first such touch since the last backward; those that are pending from before it come
// first. Local.
#pragma once

#include <cstddef>
#include <map>
#include <unordered_map>
#include <vector>

namespace fsdp::internal {

template <class Group>
class PendingReductions {
 public:
  void touched(Group group) {
    if (fresh_.contains(group)) return;
    old_.remove(group);
    fresh_.add(group);
  }
  // A backward without synchronisation left gradients on the group.
  void left_unreduced(Group group) {
    if (!contains(group)) old_.add(group);
  }
  void reduced(Group group) {
    fresh_.remove(group);
    old_.remove(group);
  }
  // A backward ended: what is still pending keeps no place among the next forward's
  // touches.
  void backward_ended() {
    for (const auto& [number, group] : fresh_.in_order()) old_.add(group);
    fresh_ = {};
  }
  std::vector<Group> in_order() const {
    std::vector<Group> groups;
    for (const auto* line : {&old_, &fresh_}) {
      for (const auto& [number, group] : line->in_order()) groups.push_back(group);
    }
    return groups;
  }
  bool contains(Group group) const { return fresh_.contains(group) || old_.contains(group); }

 private:
  // Groups in the order in which they came, each once.
  class Line {
   public:
    bool contains(Group group) const { return numbers_.contains(group); }
    void add(Group group) {
      if (numbers_.try_emplace(group, next_).second) groups_.emplace(next_++, group);
    }
    void remove(Group group) {
      const auto found = numbers_.find(group);
      if (found == numbers_.end()) return;
      groups_.erase(found->second);
      numbers_.erase(found);
    }
    const std::map<size_t, Group>& in_order() const { return groups_; }  // by number

   private:
    size_t next_ = 0;
    std::map<size_t, Group> groups_;
    std::unordered_map<Group, size_t> numbers_;
  };

  Line fresh_, old_;
};

}  // namespace fsdp::internal
