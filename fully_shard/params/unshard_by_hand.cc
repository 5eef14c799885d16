#include "fully_shard/params/unshard_by_hand.h"

#include "fully_shard/params/runtime_mode.h"

namespace fsdp::internal {
namespace {

class Pinned {
 public:
  explicit Pinned(Touchable& group) : group_(group) { group_.pin(); }
  ~Pinned() { group_.unpin(); }
  Pinned(const Pinned&) = delete;

 private:
  Touchable& group_;
};

bool is_never_sharded(const FSDPParamGroup& group) {
  return group.unsharded().sharded_state().is_never_sharded();
}

void asked_by_hand(FSDPParamGroup& group) {
  group.unsettle();
  group.info().driver().unsharded_by_hand(group.info().unit());
}

}  // namespace

void unshard_async(FSDPParamGroup& group) {
  if (is_never_sharded(group)) return;
  group.await_failed_backward();
  const ExclusiveUse use(group.info().comm_context().user());
  group.unsharded().empty_if_stale();
  group.issue_unshard();
  if (!group.unsharded().sharded_state().is_sharded()) asked_by_hand(group);
}

void unshard(FSDPParamGroup& group) {
  if (is_never_sharded(group)) return;
  group.await_failed_backward();
  const ExclusiveUse use(group.info().comm_context().user());
  const RuntimeMode runtime_mode;
  {
    const Pinned pinned(group);
    group.unsharded().empty_if_stale();
    group.issue_unshard();
    group.wait_unshard();
  }
  asked_by_hand(group);
}

void hold(FSDPParamGroup& group) {
  unshard(group);
  group.unsharded().hold();
}

void release(FSDPParamGroup& group) {
  group.unsharded().release();
  if (!group.unsharded().sharded_state().is_held()) group.reshard();
}

void release_own_parts(FSDPParamGroup& group) {
  group.unsharded().release();
  if (!group.unsharded().may_be_emptied()) return;
  group.writes().write_back_own_parts();
  group.reshard();
}

}  // namespace fsdp::internal
