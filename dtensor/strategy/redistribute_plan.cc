#include "dtensor/strategy/redistribute_plan.h"

#include <utility>

namespace fsdp::internal {
namespace {

class RedistributePlanner {
 public:
  RedistributePlanner(const std::vector<Placement>& from, const std::vector<Placement>& to)
      : placements_(from), to_(to) {}

  std::vector<RedistributeMove> plan() && {
    undo_inner_cuts();
    reduce_before_splitting();
    for (size_t m = 0; m < to_.size(); ++m) move(m, to_[m]);
    return std::move(moves_);
  }

 private:
  void undo_inner_cuts() {
    for (size_t m = placements_.size(); m-- > 1;) {
      if (lies_inside_a_change(m)) move(m, Replicate{});
    }
  }

  bool lies_inside_a_change(size_t m) const {
    if (!placements_[m].is_shard()) return false;
    const int64_t dim = placements_[m].shard_dim();
    for (size_t outer = 0; outer < m; ++outer) {
      const bool cuts_it = placements_[outer].is_shard(dim) || to_[outer].is_shard(dim);
      if (cuts_it && placements_[outer] != to_[outer]) return true;
    }
    return false;
  }

  void reduce_before_splitting() {
    if (!splits()) return;
    for (size_t m = 0; m < to_.size(); ++m) {
      if (placements_[m].is_partial() && placements_[m] != to_[m]) move(m, Replicate{});
    }
  }

  bool splits() const {
    for (size_t m = 0; m < to_.size(); ++m) {
      if (to_[m].is_partial() && to_[m] != placements_[m]) return true;
    }
    return false;
  }

  void move(size_t m, const Placement& to) {
    if (placements_[m] == to) return;
    moves_.push_back({m, std::exchange(placements_[m], to), to});
  }

  std::vector<Placement> placements_;  // so far
  const std::vector<Placement>& to_;
  std::vector<RedistributeMove> moves_;
};

}  // namespace

std::vector<RedistributeMove> redistribute_plan(const std::vector<Placement>& from,
                                                const std::vector<Placement>& to) {
  return RedistributePlanner(from, to).plan();
}

}  // namespace fsdp::internal
