// The reductions of one backward: when each group's gradients leave, and what is on the
// way. There are two kinds, for what moves the rows:
//
//   reductions_in_order.h  all ranks reduce the same groups in the same order
//   reductions_by_unit.h   ranks that share memory reduce the groups that each uses
//
// Either way a rank's groups leave in the order of reduction_order.h. One thread at a
// time.
#pragma once

#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/reduce_scatter.h"
#include "fully_shard/step/reduction_order.h"
#include "fully_shard/units/root.h"

#include <memory>
#include <set>
#include <vector>

namespace fsdp::internal {

class Reductions {
 public:
  virtual ~Reductions() = default;
  Reductions(const Reductions&) = delete;

  // The backward has met `root`; groups of it that owe a reduction take part, in this
  // order.
  virtual void meet(const std::shared_ptr<Root>& root, const std::vector<FSDPParamGroup*>& owing);
  // The backward has come to a group, which takes part. That it has come to one of
  // `kWithUnitsBelow` says nothing of the groups before it.
  enum class Place { kWithUnitsBelow, kInnermost };
  void touched(FSDPParamGroup& group, Place place);
  // What can leave by now does.
  void send_ready();
  // A gradient of a group that has left.
  virtual void came_late(FSDPParamGroup& group) = 0;

  bool has_left(FSDPParamGroup& group) const { return order_.has_left(&group); }
  const std::vector<FSDPParamGroup*>& groups() const { return order_.groups(); }
  virtual void remove(FSDPParamGroup& group);

  // Whether the backward accumulates everywhere it can: neither autograd::grad(), nor
  // backward() with inputs.
  enum class Reach { kEverywhere, kInputs };

 protected:
  explicit Reductions(Reach reach) : reach_(reach) {}
  // Every group that takes part, once.
  virtual void send(FSDPParamGroup& group) = 0;
  void send_all();
  // A group's gradients of this backward and those that waited, in rows, one per dtype.
  static std::vector<ReduceScatterInput> take_rows(FSDPParamGroup& group);

  Reach reach_;
  ReductionOrder<FSDPParamGroup*> order_;
};

}  // namespace fsdp::internal
