// Tensors that ranks hold parts of, each computed with whole on one rank of its mesh, its
// owner, and its result brought back. They travel in buckets, and while one is computed
// with, the next one travels.
//
//   OwnerBuckets buckets({{weight, 1e6}, {other, 2e6}}, kBucketBytes);   // plans; local
//   buckets.run("step of Muon", {.part_of = ..., .compute = ..., .apply = ...});
#pragma once

#include "device_mesh/device_mesh.h"
#include "optim/internal/owner_exchange.h"
#include "optim/internal/owners.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {

constexpr int64_t kBucketBytes = int64_t{64} << 20;  // as sent, all ranks together

struct OwnedItem {
  at::Tensor like;  // a DTensor without Partial
  double cost;      // of computing with it, in any unit
  at::ScalarType sent_as;
};

class OwnerBuckets {
 public:
  // Owners are dealt out by cost, bucket by bucket, over all ranks of an item's mesh. An
  // item of more than `bucket_bytes` is a bucket of its own. Local; ranks that have the
  // same items decide alike.
  OwnerBuckets(std::vector<OwnedItem> items, int64_t bucket_bytes);

  // The coordinate in the item's mesh, and whether it is this rank's.
  const std::vector<int64_t>& owner_of(size_t item) const { return owners_[item]; }
  bool is_owner(size_t item) const;

  struct Work {
    // This rank's part of the item, contiguous, plain and of `sent_as`.
    c10::function_ref<at::Tensor(size_t)> part_of;
    // On the owner: the result, of the same shape and dtype as the whole that it gets.
    c10::function_ref<at::Tensor(size_t, const at::Tensor&)> compute;
    // This rank's part of the result.
    c10::function_ref<void(size_t, const at::Tensor&)> apply;
  };
  struct Sent {
    int64_t exchanges = 0;       // that were issued
    int64_t received_bytes = 0;  // from other ranks
  };
  // Each function is called once for an item that it has to do with, `part_of` of one
  // bucket ahead of `compute` and `apply` of the one before. Of the items that
  // `takes_part` says, which is the same on all ranks. Collective over the meshes of
  // these, and throws as OwnerExchange does; buckets that came back before an error have
  // been applied.
  Sent run(const std::string& what, const std::vector<bool>& takes_part, const Work& work) const;

 private:
  struct Bucket {
    DeviceMesh mesh;
    std::vector<size_t> items;
    int64_t bytes = 0;
  };
  void add_to_bucket(size_t item, int64_t bucket_bytes);
  void deal_out();
  std::vector<Bucket> buckets_with(const std::vector<bool>& takes_part) const;
  OwnerExchange exchange_of(const Bucket& bucket, const std::string& what) const;

  std::vector<OwnedItem> items_;
  std::vector<Bucket> buckets_;
  std::vector<std::vector<int64_t>> owners_;  // by item
};

}  // namespace fsdp::internal
