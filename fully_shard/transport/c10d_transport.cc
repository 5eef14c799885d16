#include "fully_shard/transport/c10d_transport.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "device_mesh/process_groups/process_group_factory.h"
#include "fully_shard/host_exchange.h"
#include "fully_shard/transport/host_exchange.h"
#include "fully_shard/transport/shared_shards.h"
#include "fully_shard/transport/unordered_reductions.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions().dtype(at::kByte).device(device);
}

class C10dTransport final : public Transport {
 public:
  C10dTransport(const DeviceMesh& mesh, int64_t dim)
      : gathers_(collectives_of(mesh, dim)),
        reductions_(gathers_.beside(
            mesh.size(dim) == 1 ? mesh.group(dim) : mesh.side_group(dim, reductions_on(mesh)))),
        device_(local_device(mesh)) {
    if (!device_.is_cpu() && shard_count() > 1 && has_gloo(reductions_.group()))
      host_exchange_.emplace(gathers_, reductions_);
    if (const auto channel = channel_of(reductions_))
      unordered_reductions_ = std::make_unique<UnorderedReductions>(channel, reductions_);
  }

  int64_t shard_rank() const override { return gathers_.rank(); }
  int64_t shard_count() const override { return gathers_.size(); }

  at::Tensor shard_memory(int64_t bytes, c10::Device device) override {
    return at::zeros({bytes}, bytes_on(device));
  }
  at::Tensor staging_memory(int64_t bytes, c10::Device device) override {
    return device_.is_cpu() ? shard_memory(bytes, device)
                            : scratch_memory({bytes}, at::kByte, device);
  }
  at::Tensor row_memory(int64_t row_bytes, c10::Device device) override {
    return reductions_.row_memory({shard_count(), row_bytes}, device);
  }

  std::shared_ptr<SharedShards> share_shards(const ShardsToShare& shards_of_unit) override {
    const auto channel = channel_of(gathers_);
    if (!channel) return nullptr;
    auto shards = std::make_shared<SharedShards>(
        SharedShards::Options{.channel = channel,
                              .gathers = gathers_,
                              .number = channel->next_shared_number(),
                              .shards = shards_of_unit,
                              .patience = patience_,
                              .patience_to_begin = patience_to_begin_});
    std::erase_if(shared_, [](const auto& each) { return each.expired(); });
    shared_.push_back(shards);
    return shards;
  }

  std::unique_ptr<Gather> gather(const at::Tensor& shards, const Issue& issue) override {
    return gathers_.start(GatherOptions{.row = shards,
                                        .lengths = lengths_of(issue),
                                        .what = named("all-gather", issue),
                                        .unit = issue.unit,
                                        .words = issue.words,
                                        .custom = issue.custom});
  }

  std::unique_ptr<PendingReduction> reduce(at::Tensor rows, at::ScalarType dtype,
                                           const Issue& issue) override {
    return reductions_.start(SumRowsOptions{.rows = std::move(rows),
                                            .lengths = lengths_of(issue),
                                            .dtype = dtype,
                                            .what = named("reduce-scatter", issue),
                                            .unit = issue.unit,
                                            .custom = issue.custom});
  }

  std::unique_ptr<PendingReduction> all_reduce(at::Tensor row, const Issue& issue) override {
    return reductions_.start(SumRowOptions{.row = std::move(row),
                                           .what = named("all-reduce", issue),
                                           .unit = issue.unit,
                                           .words = issue.words});
  }

  void connect_gathers() override { connect(gathers_.group(), device_); }
  void connect_reductions() override { connect(reductions_.group(), device_); }

  UnorderedReductions* unordered_reductions() override { return unordered_reductions_.get(); }
  void end_of_backward() override {
    for (const auto& weak : shared_) {
      if (const auto shards = weak.lock()) shards->end_of_backward();
    }
  }

  bool checks_stamps() const override { return device_.is_cpu(); }
  bool reads_flags() const override { return device_.is_cpu(); }
  HostExchange* host_exchange() override {
    return host_exchange_ && fsdp::host_exchange() ? &*host_exchange_ : nullptr;
  }

 private:
  // Meshes that share a dimension reduce over it each in its own order.
  static std::string reductions_on(const DeviceMesh& mesh) {
    std::string purpose = "reduce";
    if (mesh.ndim() > 1) {
      for (const auto& name : mesh.dim_names()) purpose += "/" + name;
    }
    return purpose;
  }
  // Null where ranks do not share memory.
  std::shared_ptr<PeerChannel> channel_of(const Collectives& collectives) const {
    return device_.is_cpu() ? PeerChannel::of(collectives.group()) : nullptr;
  }
  static std::vector<int64_t> lengths_of(const Issue& issue) {
    return issue.lengths == nullptr ? std::vector<int64_t>() : *issue.lengths;
  }
  static std::string named(const char* operation, const Issue& issue) {
    return operation + (" of " + in_words(issue));
  }

  Collectives gathers_, reductions_;
  c10::Device device_;
  std::optional<HostExchange> host_exchange_;
  std::vector<std::weak_ptr<SharedShards>> shared_;
  const std::shared_ptr<Patience> patience_ = std::make_shared<Patience>();
  const std::shared_ptr<Patience> patience_to_begin_ = std::make_shared<Patience>();
  std::unique_ptr<UnorderedReductions> unordered_reductions_;  // null: in one order
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(const DeviceMesh& mesh, int64_t dim) {
  return std::make_unique<C10dTransport>(mesh, dim);
}

}  // namespace fsdp::internal
