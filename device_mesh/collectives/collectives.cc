#define XXH_INLINE_ALL
#include "device_mesh/collectives/collectives.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/backend/row_exchange.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/riding_collectives.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/collectives/start_all_to_all.h"
#include "device_mesh/collectives/start_gather.h"
#include "device_mesh/collectives/start_reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <xxhash.h>

#include <utility>

namespace fsdp::internal {
namespace {

// By which calls of different names, whose messages have one size, are told apart.
uint32_t number_of_call(const std::string& call) {
  return call.empty() ? kNoUnit : XXH32(call.data(), call.size(), 0);
}

IssuedOperation operation_on(CollectiveKind kind, const std::string& what,
                             const at::Tensor& tensor) {
  return {.kind = kind,
          .unit = number_of_call(what),
          .what = what,
          .bytes = static_cast<int64_t>(tensor.nbytes())};
}

// Added in the order of the ranks, 16-bit types in float, by messages that are posted
// with the announcement.
void exchange_and_sum(const std::shared_ptr<IssueLog>& log, const Group& group,
                      const ReduceScatterOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto size = group_size(group);
  const auto rows =
      options.input.clone(at::MemoryFormat::Contiguous).view({size, -1}).view(at::kByte);
  auto announcement =
      log->announce(operation_on(CollectiveKind::kReduceScatter, options.what, options.input));
  const auto sum = log->watch([&] {
    return RowExchange(group, rows, options.input.scalar_type(),
                       {.what = options.what,
                        .tag = tag_of(announcement.stamp()),
                        .agree = [&] { announcement.wait(); }})
        .wait();
  });
  options.output.view({-1}).copy_(sum);
}

}  // namespace

struct Collectives::State {
  Group group;
  std::shared_ptr<IssueLog> log;
  int64_t rank = group_rank(group), size = group_size(group);
};

Collectives::Collectives(std::shared_ptr<const State> state) : state_(std::move(state)) {}

Collectives Collectives::of(const Group& group, c10::DeviceType device_type) {
  return Collectives(std::make_shared<const State>(State{group, IssueLog::of(group, device_type)}));
}

Collectives Collectives::beside(const Group& side) const {
  return Collectives(std::make_shared<const State>(State{side, log()->beside(side)}));
}

const std::shared_ptr<IssueLog>& Collectives::log() const { return state_->log; }
const Group& Collectives::group() const { return state_->group; }
int64_t Collectives::rank() const { return state_->rank; }
int64_t Collectives::size() const { return state_->size; }

void Collectives::all_gather(const AllGatherOptions& options) const {
  check_gather(group(), options.output, options.input);
  if (options.input.numel() == 0) return;
  const auto operation = operation_on(CollectiveKind::kAllGather, options.what, options.input);
  if (log()->carries_any())
    return riding_rows(*log(), operation, options.input, /*rows=*/1, options.output);
  log()->run(operation,
             [&] { return internal::all_gather(group(), options.output, options.input); });
}

void Collectives::reduce_scatter(const ReduceScatterOptions& options) const {
  check_reduce_scatter(group(), options.output, options.input);
  if (options.output.numel() == 0) return;
  const auto operation = operation_on(CollectiveKind::kReduceScatter, options.what, options.input);
  if (options.op == ReduceOp::kSum && log()->carries_any())
    return riding_reduce_scatter(*log(), operation, size(), options);
  if (options.op == ReduceOp::kSum && better_by_messages(group(), options.input))
    return exchange_and_sum(log(), group(), options);
  log()->run(operation, [&] {
    return internal::reduce_scatter(group(), options.output, options.input, options.op);
  });
}

void Collectives::all_reduce(const AllReduceOptions& options) const {
  const auto& tensor = options.tensor;
  if (tensor.numel() == 0) return;
  if (options.op == ReduceOp::kSum && adds_in_order(tensor)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto flat = tensor.view({-1});
    flat.copy_(
        start_row_sum(log(), group(),
                      {.row = flat, .what = options.what, .unit = number_of_call(options.what)})
            ->wait());
    return;
  }
  log()->run(operation_on(CollectiveKind::kAllReduce, options.what, tensor),
             [&] { return internal::all_reduce(group(), tensor, options.op); });
}

// Where it travels by messages, so that the bits do not depend on which ones. Not of
// booleans, whose sum the backend knows.
bool Collectives::adds_in_order(const at::Tensor& tensor) const {
  return better_by_messages(group(), tensor) && tensor.scalar_type() != at::kBool;
}

void Collectives::broadcast(const BroadcastOptions& options) const {
  check_broadcast(group(), options.root);
  if (options.tensor.numel() == 0) return;
  const auto operation = operation_on(CollectiveKind::kBroadcast, options.what, options.tensor);
  if (log()->carries_any()) return riding_broadcast(*log(), operation, rank(), options);
  log()->run(operation, [&] { return internal::broadcast(group(), options.tensor, options.root); });
}

void Collectives::all_to_all(const AllToAllOptions& options) const {
  check_all_to_all(group(), options.output, options.input);
  if (options.input.numel() == 0) return;
  const auto operation = operation_on(CollectiveKind::kAllToAll, options.what, options.input);
  if (log()->carries_any())
    return riding_rows(*log(), operation, options.input, size(), options.output);
  log()->run(operation,
             [&] { return internal::all_to_all(group(), options.output, options.input); });
}

void Collectives::barrier(const std::string& what) const {
  const IssuedOperation operation = {.kind = CollectiveKind::kAllReduce, .what = what};
  if (log()->carries_any()) {
    log()->announce(operation).wait();  // all have come
    return;
  }
  log()->run(operation, [&] { return internal::barrier(group()); });
}

at::Tensor Collectives::row_memory(at::IntArrayRef sizes, c10::Device device) const {
  return device.is_cpu() ? rider_memory(group(), sizes) : scratch_memory(sizes, at::kByte, device);
}

at::Tensor Collectives::rows_of_ranks(const RowsOptions& options) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto row = options.row.contiguous();
  auto shape = row.sizes().vec();
  shape.insert(shape.begin(), size());
  auto operation = operation_on(CollectiveKind::kAllGather, options.what, row);
  operation.unit = number_of_call(options.call);
  if (row.is_cpu() && log()->carries(operation.bytes)) {
    const auto rider = operation.bytes > 0 ? tensor_bytes(row).view({1, -1}) : at::Tensor();
    auto announcement = log()->announce(operation, rider);
    announcement.wait();
    return at::stack(announcement.riders()).view({-1}).view(row.scalar_type()).view(shape);
  }
  auto rows = at::empty(shape, row.options());
  if (row.numel() == 0) return rows;
  log()->run(operation, [&] { return internal::all_gather(group(), rows, row); });
  return rows;
}

std::unique_ptr<Gather> Collectives::start(const GatherOptions& options) const {
  return start_gather(log(), group(), options);
}

std::unique_ptr<PendingReduction> Collectives::start(const SumRowsOptions& options) const {
  return start_reduction(log(), group(), options);
}

std::unique_ptr<PendingReduction> Collectives::start(const SumRowOptions& options) const {
  return start_row_sum(log(), group(), options);
}

std::unique_ptr<PendingAllToAll> Collectives::start(const AllToAllSplitOptions& options) const {
  return start_all_to_all(log(), group(), options, number_of_call(options.what));
}

}  // namespace fsdp::internal
