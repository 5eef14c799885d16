// Which groups' reductions are pending (PendingReductions), and the order in which those
// of one backward leave (ReductionOrder). Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp::internal {

// The groups whose reduction is pending: a forward that records gradients touched them
// since their last one, or a backward without synchronisation did. In the order of the
// first such touch since the last backward; those that are pending from before it come
// first. Local.
template <class Group>
class PendingReductions {
 public:
  void add(Group group) {
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

// The fixed order in which the reductions of one backward leave: the reverse of the
// units' first forward touches.
//
// A complete group waits for those before it. An incomplete one leaves, with zeros for
// what has not arrived, when the second group after it was touched: its gradients are as
// good as done. The last one waits for the end of the backward, since it tells all ranks
// whether one of them has gradients that came after their reduction had left. Nothing
// else decides, so every rank's order is the same whatever arrives there, and when.
//
//   forward a b c d; backward comes to d c b a, gradients arrive as they like
//   order   d c b a
//   come_to(b)                  d may leave, complete or not
//   next(complete) -> d         then c, if it is complete, ...
//   next_at_end()  -> c b a
template <class Group>
class ReductionOrder {
 public:
  ReductionOrder() = default;
  // Each once.
  explicit ReductionOrder(std::vector<Group> groups) : groups_(std::move(groups)) {
    find_places(0);
  }

  // `group` is to take part: at the end, where it has no place yet.
  void add(const Group& group) {
    if (places_.try_emplace(group, groups_.size()).second) groups_.push_back(group);
  }
  // The backward has come to `group`.
  void come_to(const Group& group) {
    add(group);
    const size_t place = place_of(group);
    if (place >= 2) forced_ = std::max(forced_, place - 1);
  }
  // The group that leaves now, or null; each once.
  template <class IsComplete>
  const Group* next(const IsComplete& is_complete) {
    if (next_ + 1 >= groups_.size()) return nullptr;
    if (next_ >= forced_ && !is_complete(groups_[next_])) return nullptr;
    return &groups_[next_++];
  }
  // The same at the end of the backward, when all that are left leave.
  const Group* next_at_end() { return next_ < groups_.size() ? &groups_[next_++] : nullptr; }
  bool has_left(const Group& group) const { return place_of(group) < next_; }

  void remove(const Group& group) {
    const size_t place = place_of(group);
    if (place == groups_.size()) return;
    if (place < next_) --next_;
    if (place < forced_) --forced_;
    groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(place));
    places_.erase(group);
    find_places(place);
  }
  const std::vector<Group>& groups() const { return groups_; }

 private:
  size_t place_of(const Group& group) const {
    const auto found = places_.find(group);
    return found == places_.end() ? groups_.size() : found->second;
  }
  void find_places(size_t first) {
    for (size_t place = first; place < groups_.size(); ++place) places_[groups_[place]] = place;
  }

  std::vector<Group> groups_;
  std::unordered_map<Group, size_t> places_;  // in groups_
  size_t next_ = 0;                           // everything before has left
  size_t forced_ = 0;                         // everything before leaves, complete or not
};

}  // namespace fsdp::internal
