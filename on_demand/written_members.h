// The parameters that one operator writes. It may change their values, not their shape:
// out= with a result of another size and transpose_() would part a parameter from its
// shards.
#pragma once

#include "on_demand/on_demand_storage.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// REQUIRES: the members outlive this object.
class WrittenMembers {
 public:
  // Views of parameters are left out: their shape is their own.
  void add(const OnDemandStorage& storage, c10::TensorImpl* impl);
  // Gives every parameter its shape back, and throws for the first that lost it.
  void check_shapes(const c10::OperatorHandle& op) const;

 private:
  struct Member {
    const OnDemandStorage* storage;
    c10::TensorImpl* impl;
    std::vector<int64_t> sizes, strides;
  };
  c10::SmallVector<Member, 1> members_;
};

}  // namespace fsdp::internal
