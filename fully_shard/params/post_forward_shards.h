// What a group keeps of its full parameters between forward and backward with
// ReshardAfterForward::to_world(n): every rank one n-th, which a gather over n
// neighbouring ranks puts together again. The shards stay as they are. Local.
//
//   kept.keep(unsharded);               // before they are emptied
//   unsharded.issue(kept.row(), ...);   // gathers over the neighbours
//   kept.drop();                        // the next gather is over all shards again
#pragma once

#include "fully_shard/params/group_accounts.h"
#include "fully_shard/params/unsharded_params.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/stream_memory.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fsdp::internal {

class PostForwardShards {
 public:
  // `neighbours`: to the ranks that keep the other parts.
  PostForwardShards(const std::vector<FSDPParam>& params, std::shared_ptr<Transport> neighbours,
                    GroupAccounts accounts);
  ~PostForwardShards() { drop(); }
  PostForwardShards(const PostForwardShards&) = delete;

  const std::shared_ptr<Transport>& neighbours() const { return neighbours_; }
  // Takes this rank's part of unsharded parameters, which lie as `layout` says.
  void keep(UnshardedParams& unsharded, const PackedLayout& layout, c10::Device device);
  bool is_kept() const { return bytes_.defined(); }
  // To be gathered by the calling thread's stream. REQUIRES: is_kept().
  PackedRow row() {
    memory_.use(DeviceStream::current(bytes_.device()));
    return {*neighbours_, layout_, bytes_};
  }
  void drop();

 private:
  std::shared_ptr<Transport> neighbours_;
  PackedLayout layout_;
  GroupAccounts accounts_;
  at::Tensor bytes_;  // memory of the transport; undefined: nothing is kept
  StreamMemory memory_{StreamWait::kUseAfterFill, StreamWait::kFreeAfterUse};  // bytes_
};

}  // namespace fsdp::internal
