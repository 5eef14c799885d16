#include "optim/internal/orthogonalize.h"

#include "device_mesh/internal/mesh_layout.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "optim/internal/owner_exchange.h"
#include "optim/internal/owners.h"

#include <c10/util/Exception.h>

#include <deque>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kBucketBytes = int64_t{64} << 20;  // of bf16, all ranks together

at::Tensor in_bf16(const at::Tensor& part) { return part.to(at::kBFloat16).contiguous(); }

// Items of one mesh that travel together.
struct Bucket {
  DeviceMesh mesh;
  std::vector<size_t> items;
  int64_t bytes = 0;
};

class Orthogonalizer {
 public:
  Orthogonalizer(const std::vector<ToOrthogonalize>& items,
                 c10::function_ref<at::Tensor(size_t)> update_of,
                 c10::function_ref<void(size_t, const at::Tensor&)> apply, MuonCounters& counters)
      : items_(items), update_of_(update_of), apply_(apply), counters_(counters) {}

  void run() {
    for (size_t i = 0; i < items_.size(); ++i)
      is_whole_here(items_[i]) ? compute_here(i) : add_to_bucket(i);
    travel();
  }

 private:
  static bool is_whole_here(const ToOrthogonalize& item) {
    const auto* const meta = find_meta(item.like);
    return meta == nullptr || are_whole_on_all_ranks(meta->spec.layout(), item.matrices);
  }

  at::Tensor direction_of(const ToOrthogonalize& item, const at::Tensor& stack) {
    auto matrices = matrices_of(item.like.sizes().vec(), item.matrices);
    const auto elements = matrices.rows * matrices.columns;
    matrices.count = elements > 0 ? stack.numel() / elements : 0;
    counters_.matrices += matrices.count;
    counters_.work += newton_schulz_cost(matrices);
    return orthogonalized(stack, matrices, item.iteration);
  }

  void compute_here(size_t i) {
    const at::Tensor update = update_of_(i);
    const at::Tensor direction = direction_of(items_[i], in_bf16(held_part(update)));
    apply_(i, is_dtensor(update) ? make_dtensor(direction, spec_of(update)) : direction);
  }

  void add_to_bucket(size_t i) {
    const auto& mesh = spec_of(items_[i].like).mesh();
    const int64_t bytes = items_[i].like.numel() * 2;
    auto open = buckets_.rbegin();  // the last one of this mesh
    while (open != buckets_.rend() && !(open->mesh == mesh)) ++open;
    if (open == buckets_.rend() || open->bytes + bytes > kBucketBytes) {
      buckets_.push_back({.mesh = mesh});
      open = buckets_.rbegin();
    }
    open->items.push_back(i);
    open->bytes += bytes;
  }

  Owners& owners_on(const DeviceMesh& mesh) {
    for (auto& [known, owners] : owners_)
      if (known == mesh) return owners;
    return owners_.emplace_back(mesh, Owners(mesh.size())).second;
  }

  std::vector<OwnedTensor> owned(const Bucket& bucket) {
    std::vector<double> costs;
    for (const size_t i : bucket.items)
      costs.push_back(
          newton_schulz_cost(matrices_of(items_[i].like.sizes().vec(), items_[i].matrices)));
    const auto owners = owners_on(bucket.mesh).assign(costs);
    const auto grid = MeshLayout::row_major(bucket.mesh.shape());
    std::vector<OwnedTensor> tensors;
    for (size_t k = 0; k < bucket.items.size(); ++k)
      tensors.push_back({.layout = spec_of(items_[bucket.items[k]].like).layout(),
                         .owner = *grid.coordinate_of(owners[k])});
    return tensors;
  }

  void start(size_t number) {
    const auto& bucket = buckets_[number];
    auto& exchange = exchanges_.emplace_back(bucket.mesh, owned(bucket),
                                             c10::str("step of Muon, bucket ", number));
    std::vector<at::Tensor> parts;
    for (const size_t i : bucket.items) parts.push_back(in_bf16(held_part(update_of_(i))));
    exchange.start(std::move(parts));
  }

  void compute(size_t number) {
    auto& exchange = exchanges_[number];
    auto wholes = exchange.wait();
    for (size_t k = 0; k < wholes.size(); ++k)
      if (exchange.is_owner(k))
        wholes[k] = direction_of(items_[buckets_[number].items[k]], wholes[k]);
    exchange.start_back(std::move(wholes));
  }

  void finish(size_t number) {
    auto& exchange = exchanges_[number];
    const auto parts = exchange.wait_back();
    const auto& items = buckets_[number].items;
    for (size_t k = 0; k < items.size(); ++k)
      apply_(items[k], make_dtensor(parts[k], spec_of(items_[items[k]].like)));
    counters_.exchanges += exchange.issued();
    counters_.received_bytes += exchange.received_bytes();
  }

  void travel() {
    const size_t count = buckets_.size();
    if (count > 0) start(0);
    for (size_t number = 0; number < count; ++number) {
      if (number + 1 < count) start(number + 1);
      compute(number);
      if (number > 0) finish(number - 1);
    }
    if (count > 0) finish(count - 1);
  }

  const std::vector<ToOrthogonalize>& items_;
  const c10::function_ref<at::Tensor(size_t)> update_of_;
  const c10::function_ref<void(size_t, const at::Tensor&)> apply_;
  MuonCounters& counters_;
  std::vector<Bucket> buckets_;
  std::vector<std::pair<DeviceMesh, Owners>> owners_;
  std::deque<OwnerExchange> exchanges_;  // by bucket
};

}  // namespace

void orthogonalize(const std::vector<ToOrthogonalize>& items,
                   c10::function_ref<at::Tensor(size_t)> update_of,
                   c10::function_ref<void(size_t, const at::Tensor&)> apply,
                   MuonCounters& counters) {
  Orthogonalizer(items, update_of, apply, counters).run();
}

}  // namespace fsdp::internal
