#include "fully_shard/transport/transport.h"

#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "device_mesh/process_groups/process_group_factory.h"
#include "fully_shard/host_exchange.h"
#include "fully_shard/transport/host_exchange.h"
#include "fully_shard/transport/row_codes.h"
#include "fully_shard/transport/shared_shards.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// Meshes that share a dimension reduce over it each in its own order.
std::string reductions_on(const DeviceMesh& mesh) {
  std::string purpose = "reduce";
  if (mesh.ndim() > 1) {
    for (const auto& name : mesh.dim_names()) purpose += "/" + name;
  }
  return purpose;
}

std::string named(const char* operation, const Issue& issue) {
  return operation + (" of " + in_words(issue)) + issue.form;
}

}  // namespace

std::string in_words(const Issue& issue) {
  const auto name = "unit '" + issue.unit_name + "'";
  if (issue.unit_name != kRootName) return name;
  return name + " (number " + std::to_string(issue.unit) + ")";
}

Transport::Transport(const DeviceMesh& mesh, int64_t dim)
    : gathers_(collectives_of(mesh, dim)),
      reductions_(gathers_.beside(mesh.size(dim) == 1 ? mesh.group(dim)
                                                      : mesh.side_group(dim, reductions_on(mesh)))),
      device_(local_device(mesh)),
      patience_(std::make_shared<Patience>()),
      patience_to_begin_(std::make_shared<Patience>()) {
  if (!device_.is_cpu() && shard_count() > 1 && has_gloo(reductions_.group()))
    host_exchange_ = std::make_unique<HostExchange>(gathers_, reductions_);
}

Transport::~Transport() = default;

at::Tensor Transport::shard_memory(int64_t bytes, c10::Device device) const {
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

at::Tensor Transport::staging_memory(int64_t bytes, c10::Device device) const {
  return device_.is_cpu() ? shard_memory(bytes, device)
                          : scratch_memory({bytes}, at::kByte, device);
}

at::Tensor Transport::row_memory(int64_t row_bytes, c10::Device device) {
  return reductions_.row_memory({shard_count(), row_bytes}, device);
}

std::shared_ptr<SharedShards> Transport::share_shards(const ShardsToShare& shards_of_unit) {
  const auto channel = device_.is_cpu() ? PeerChannel::of(gathers_.group()) : nullptr;
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

InFlight<GatheredRows> Transport::gather(const at::Tensor& shards, const Issue& issue) {
  return gathers_.start(AllGatherOptions{.input = shards,
                                         .lengths = issue.lengths,
                                         .what = named("all-gather", issue),
                                         .unit = issue.unit,
                                         .words = issue.words,
                                         .custom = issue.custom});
}

InFlight<SummedRow> Transport::reduce(at::Tensor rows, const Summands& summands,
                                      const Issue& issue) {
  return reductions_.start(ReduceScatterOptions{.input = std::move(rows),
                                                .lengths = issue.lengths,
                                                .summands = summands,
                                                .what = named("reduce-scatter", issue),
                                                .unit = issue.unit,
                                                .words = issue.words,
                                                .custom = issue.custom});
}

InFlight<SummedRow> Transport::all_reduce(at::Tensor row, const Issue& issue) {
  return reductions_.start(AllReduceOptions{.tensor = std::move(row),
                                            .what = named("all-reduce", issue),
                                            .unit = issue.unit,
                                            .words = issue.words});
}

InFlight<SummedRow> Transport::all_reduce(const CodedAllReduce& row, const Issue& issue) {
  return start_coded_all_reduce(
      reductions_, row,
      {.what = named("all-reduce", issue), .unit = issue.unit, .words = issue.words});
}

void Transport::connect_gathers() { connect(gathers_.group(), device_); }
void Transport::connect_reductions() { connect(reductions_.group(), device_); }

void Transport::end_of_backward() {
  for (const auto& weak : shared_) {
    if (const auto shards = weak.lock()) shards->end_of_backward();
  }
}

HostExchange* Transport::host_exchange() {
  return fsdp::host_exchange() ? host_exchange_.get() : nullptr;
}

}  // namespace fsdp::internal
