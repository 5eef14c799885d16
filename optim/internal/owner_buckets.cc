#include "optim/internal/owner_buckets.h"

#include "device_mesh/internal/mesh_layout.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/util/Exception.h>

#include <deque>

namespace fsdp::internal {
namespace {

// One run over buckets: exchange, computation, exchange back, in turns.
template <class Bucket>
class Pipeline {
 public:
  Pipeline(const std::vector<Bucket>& buckets, std::deque<OwnerExchange>& exchanges,
           const OwnerBuckets::Work& work)
      : buckets_(buckets), exchanges_(exchanges), work_(work) {}

  OwnerBuckets::Sent run() {
    const size_t count = buckets_.size();
    if (count > 0) start(0);
    for (size_t number = 0; number < count; ++number) {
      if (number + 1 < count) start(number + 1);
      compute(number);
      if (number > 0) finish(number - 1);
    }
    if (count > 0) finish(count - 1);
    return sent_;
  }

 private:
  void start(size_t number) {
    std::vector<at::Tensor> parts;
    for (const size_t item : buckets_[number].items) parts.push_back(work_.part_of(item));
    exchanges_[number].start(std::move(parts));
  }

  void compute(size_t number) {
    auto& exchange = exchanges_[number];
    auto wholes = exchange.wait();
    for (size_t k = 0; k < wholes.size(); ++k)
      if (exchange.is_owner(k))
        wholes[k] = work_.compute(buckets_[number].items[k], wholes[k]).contiguous();
    exchange.start_back(std::move(wholes));
  }

  void finish(size_t number) {
    auto& exchange = exchanges_[number];
    const auto parts = exchange.wait_back();
    for (size_t k = 0; k < parts.size(); ++k) work_.apply(buckets_[number].items[k], parts[k]);
    sent_.exchanges += exchange.issued();
    sent_.received_bytes += exchange.received_bytes();
  }

  const std::vector<Bucket>& buckets_;
  std::deque<OwnerExchange>& exchanges_;  // by bucket
  const OwnerBuckets::Work& work_;
  OwnerBuckets::Sent sent_;
};

}  // namespace

OwnerBuckets::OwnerBuckets(std::vector<OwnedItem> items, int64_t bucket_bytes)
    : items_(std::move(items)), owners_(items_.size()) {
  for (size_t i = 0; i < items_.size(); ++i) add_to_bucket(i, bucket_bytes);
  deal_out();
}

void OwnerBuckets::add_to_bucket(size_t item, int64_t bucket_bytes) {
  const auto& [like, cost, sent_as] = items_[item];
  const auto& mesh = spec_of(like).mesh();
  const int64_t bytes = like.numel() * static_cast<int64_t>(c10::elementSize(sent_as));
  auto open = buckets_.rbegin();  // the last one of this mesh
  while (open != buckets_.rend() && !(open->mesh == mesh)) ++open;
  if (open == buckets_.rend() || open->bytes + bytes > bucket_bytes) {
    buckets_.push_back({.mesh = mesh, .items = {}});
    open = buckets_.rbegin();
  }
  open->items.push_back(item);
  open->bytes += bytes;
}

void OwnerBuckets::deal_out() {
  std::vector<std::pair<DeviceMesh, Owners>> by_mesh;
  const auto owners_on = [&](const DeviceMesh& mesh) -> Owners& {
    for (auto& [known, owners] : by_mesh)
      if (known == mesh) return owners;
    return by_mesh.emplace_back(mesh, Owners(mesh.size())).second;
  };
  for (const Bucket& bucket : buckets_) {
    std::vector<double> costs;
    for (const size_t item : bucket.items) costs.push_back(items_[item].cost);
    const auto owners = owners_on(bucket.mesh).assign(costs);
    const auto grid = MeshLayout::row_major(bucket.mesh.shape());
    for (size_t k = 0; k < owners.size(); ++k)
      owners_[bucket.items[k]] = *grid.coordinate_of(owners[k]);
  }
}

bool OwnerBuckets::is_owner(size_t item) const {
  return spec_of(items_[item].like).mesh().coordinate() == owners_[item];
}

std::vector<OwnerBuckets::Bucket> OwnerBuckets::buckets_with(
    const std::vector<bool>& takes_part) const {
  std::vector<Bucket> buckets;
  for (const Bucket& all : buckets_) {
    Bucket bucket{.mesh = all.mesh, .items = {}};
    for (const size_t item : all.items)
      if (takes_part[item]) bucket.items.push_back(item);
    if (!bucket.items.empty()) buckets.push_back(std::move(bucket));
  }
  return buckets;
}

OwnerExchange OwnerBuckets::exchange_of(const Bucket& bucket, const std::string& what) const {
  std::vector<OwnedTensor> tensors;
  for (const size_t item : bucket.items)
    tensors.push_back({.layout = spec_of(items_[item].like).layout(),
                       .owner = owners_[item],
                       .dtype = items_[item].sent_as});
  return {bucket.mesh, std::move(tensors), what};
}

OwnerBuckets::Sent OwnerBuckets::run(const std::string& what, const std::vector<bool>& takes_part,
                                     const Work& work) const {
  const auto buckets = buckets_with(takes_part);
  std::deque<OwnerExchange> exchanges;
  for (const Bucket& bucket : buckets)
    exchanges.push_back(exchange_of(bucket, c10::str(what, ", bucket ", exchanges.size())));
  return Pipeline(buckets, exchanges, work).run();
}

}  // namespace fsdp::internal
