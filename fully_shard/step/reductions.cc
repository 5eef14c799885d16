#include "fully_shard/step/reductions.h"

#include "fully_shard/params/runtime_mode.h"

namespace fsdp::internal {

void Reductions::meet(const std::shared_ptr<Root>&, const std::vector<FSDPParamGroup*>& owing) {
  for (auto* group : owing) order_.add(group);
}

void Reductions::touched(FSDPParamGroup& group, Place place) {
  place == Place::kInnermost ? order_.touched(&group) : order_.add(&group);
}

void Reductions::send_ready() {
  while (auto* const* group =
             order_.next([](FSDPParamGroup* each) { return each->gradients().complete(); })) {
    const RuntimeMode runtime_mode;
    send(**group);
  }
}

void Reductions::send_all() {
  while (auto* const* group = order_.next_at_end()) send(**group);
}

std::vector<ReduceScatterInput> Reductions::take_rows(FSDPParamGroup& group) {
  auto& gradients = group.gradients();
  gradients.open();  // zeros where no gradient arrived: on another rank some may have
  gradients.pack_accumulated();
  return gradients.take();
}

void Reductions::remove(FSDPParamGroup& group) { order_.remove(&group); }

}  // namespace fsdp::internal
