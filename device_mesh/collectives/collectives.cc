#define XXH_INLINE_ALL
#include "device_mesh/collectives/collectives.h"

#include "device_mesh/collectives/announcement.h"
#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/carriers.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/peer_memory/peer_channel.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

enum class Carrier { kNotice, kMessages, kBackend };

// By which operations of different names, whose messages have one size, are told apart.
uint32_t number_of_name(const std::string& name) { return XXH32(name.data(), name.size(), 0); }

// What ranks must do alike beside name and size: how values are combined, or whose they
// are.
using Manner = std::array<uint32_t, 2>;
Manner manner_of_reduction(ReduceOp op, at::ScalarType dtype) {
  return {static_cast<uint32_t>(op), static_cast<uint32_t>(dtype)};
}
Manner manner_of_sum(const Summands& summands) {
  const auto& codes = summands.codes;
  const auto form = codes ? XXH32(codes->name.data(), codes->name.size(), 0) : 0;
  return {static_cast<uint32_t>(ReduceOp::kSum), static_cast<uint32_t>(summands.dtype) ^ form};
}
Manner manner_of_broadcast(int64_t root) { return {static_cast<uint32_t>(root), 0}; }

template <class Options>
IssuedOperation operation_of(CollectiveKind kind, const Options& options, int64_t bytes,
                             const std::optional<Manner>& manner = {}) {
  auto unit = number_of_name(options.what);
  if constexpr (requires { options.unit; }) unit = options.unit.value_or(unit);
  if (manner) unit = XXH32(manner->data(), sizeof *manner, unit);
  return {.kind = kind, .unit = unit, .what = options.what, .bytes = bytes, .words = options.words};
}

int64_t bytes_in(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// uint8 [rows, bytes]
at::Tensor as_rows(const at::Tensor& tensor, int64_t rows) {
  return tensor_bytes(tensor).view({rows, bytes_in(tensor) / rows});
}

void copy_rows(const GatheredRows& rows, int64_t ranks, const at::Tensor& output) {
  const auto bytes = output.nbytes() / static_cast<size_t>(ranks);
  auto* to = static_cast<char*>(output.mutable_data_ptr());
  for (int64_t rank = 0; rank < ranks; ++rank, to += bytes) std::memcpy(to, rows.row(rank), bytes);
}

void check_splits(const Group& group, const AllToAllOptions& options) {
  const auto ranks = static_cast<size_t>(group_size(group));
  TORCH_CHECK_VALUE(
      options.input_split_sizes.size() == ranks && options.output_split_sizes.size() == ranks,
      "all_to_all: sizes for ", options.input_split_sizes.size(), " and from ",
      options.output_split_sizes.size(), " ranks, expected ", ranks, " (rank ", group_rank(group),
      ")");
  const auto sum = std::accumulate(options.input_split_sizes.begin(),
                                   options.input_split_sizes.end(), int64_t{0});
  TORCH_CHECK_VALUE(options.input.scalar_type() == at::kByte && options.input.is_contiguous() &&
                        options.input.numel() == sum,
                    "all_to_all: ", options.input.numel(), " elements of ",
                    options.input.scalar_type(), ", expected ", sum, " contiguous bytes (rank ",
                    group_rank(group), ")");
  const auto own = static_cast<size_t>(group_rank(group));
  TORCH_CHECK_VALUE(options.input_split_sizes[own] == options.output_split_sizes[own],
                    "all_to_all: ", options.input_split_sizes[own], " bytes to and ",
                    options.output_split_sizes[own], " from this rank itself (rank ",
                    group_rank(group), ")");
}

}  // namespace

struct Collectives::State {
  Group group;
  std::shared_ptr<IssueLog> log;
  int64_t rank = group_rank(group), size = group_size(group);

  // All that is sent is read where its sender has it.
  bool shares_memory() const { return log->tells() && PeerChannel::of(group) != nullptr; }

  // How an operation travels, of which `bytes` go from a rank to another. The same answer
  // on every rank. Over Gloo, sums travel with the notice between two ranks only: among
  // more, all would be in memory at once.
  Carrier carrier(CollectiveKind kind, const at::Tensor& tensor, int64_t bytes) const {
    if (!tensor.is_cpu()) return Carrier::kBackend;
    if (shares_memory()) return Carrier::kNotice;
    const bool is_gather = kind == CollectiveKind::kAllGather;
    const bool is_sum =
        kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kAllReduce;
    if (!(is_gather || is_sum) || !better_by_messages(group, tensor)) return Carrier::kBackend;
    const bool fits = log->tells() && bytes <= payload_room(size) && (is_gather || size == 2);
    return fits ? Carrier::kNotice : Carrier::kMessages;
  }
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

at::Tensor Collectives::row_memory(at::IntArrayRef sizes, c10::Device device) const {
  const auto channel = device.is_cpu() ? PeerChannel::of(group()) : nullptr;
  if (!channel) return scratch_memory(sizes, at::kByte, device);
  auto memory = channel->memory().memory(c10::multiply_integers(sizes));
  memory.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return memory;
}

InFlight<GatheredRows> Collectives::start(const AllGatherOptions& options) const {
  const auto& row = options.input;
  const auto operation = operation_of(CollectiveKind::kAllGather, options, row.numel());
  if (options.custom) return all_gather_by_backend(*this, operation, options);
  const auto carrier = state_->carrier(operation.kind, row, operation.bytes);
  if (carrier == Carrier::kNotice)
    return rows_by_notice(*this, operation, row.view({1, row.numel()}));
  return carrier == Carrier::kMessages ? all_gather_by_messages(*this, operation, options)
                                       : all_gather_by_backend(*this, operation, options);
}

InFlight<SummedRow> Collectives::start(const ReduceScatterOptions& options) const {
  const auto& rows = options.input;
  const auto operation = operation_of(CollectiveKind::kReduceScatter, options, rows.size(1),
                                      manner_of_sum(options.summands));
  if (options.custom) return reduce_scatter_by_backend(*this, operation, options);
  const auto carrier = state_->carrier(operation.kind, rows, operation.bytes);
  if (carrier == Carrier::kNotice) return sum_by_notice(*this, operation, rows, options.summands);
  return carrier == Carrier::kMessages
             ? reduce_scatter_by_messages(*this, operation, options, Rounds::kInBackground)
             : reduce_scatter_by_backend(*this, operation, options);
}

// By notice all of the row is sent, and each rank adds.
InFlight<SummedRow> Collectives::start(const AllReduceOptions& options) const {
  const auto& row = options.tensor;
  const auto operation = operation_of(CollectiveKind::kAllReduce, options, bytes_in(row),
                                      manner_of_reduction(options.op, row.scalar_type()));
  const auto carrier = state_->carrier(operation.kind, row, operation.bytes);
  if (carrier == Carrier::kNotice)
    return sum_by_notice(*this, operation, as_rows(row, 1), Summands(row.scalar_type()));
  return carrier == Carrier::kMessages ? all_reduce_by_messages(*this, operation, row)
                                       : all_reduce_by_backend(*this, operation, row);
}

// Ranks send different numbers of bytes, so these are not compared.
InFlight<std::vector<at::Tensor>> Collectives::start(const AllToAllOptions& options) const {
  check_splits(group(), options);
  const auto operation = operation_of(CollectiveKind::kAllToAll, options, /*bytes=*/0);
  const auto carrier = state_->carrier(operation.kind, options.input, operation.bytes);
  return carrier == Carrier::kNotice ? all_to_all_by_notice(*this, operation, options)
                                     : all_to_all_by_backend(*this, operation, options);
}

// Larger rows go by the backend, which writes them where the caller wants them.
std::vector<NoticeWords> Collectives::gather_into(const at::Tensor& output, const at::Tensor& input,
                                                  const IssuedOperation& operation) const {
  const BelowAutograd below_autograd;
  if (state_->carrier(operation.kind, input, operation.bytes) != Carrier::kNotice)
    return log()->run(operation, [&] { return internal::all_gather(group(), output, input); });
  const auto rows = rows_by_notice(*this, operation, as_rows(input, 1)).wait();
  copy_rows(rows, size(), output);
  return rows.words();
}

std::vector<NoticeWords> Collectives::all_gather(const AllGatherOptions& options) const {
  check_gather(group(), options.output, options.input);
  if (options.input.numel() == 0) return {};
  return gather_into(options.output, options.input,
                     operation_of(CollectiveKind::kAllGather, options, bytes_in(options.input)));
}

at::Tensor Collectives::rows_of_ranks(const RowsOptions& options) const {
  const BelowAutograd below_autograd;
  const auto row = options.row.contiguous();
  auto shape = row.sizes().vec();
  shape.insert(shape.begin(), size());
  auto rows = at::empty(shape, row.options());
  if (row.numel() == 0) return rows;
  gather_into(rows, row,
              {.kind = CollectiveKind::kAllGather,
               .unit = options.call.empty() ? kNoUnit : number_of_name(options.call),
               .what = options.what,
               .bytes = bytes_in(row)});
  return rows;
}

std::vector<NoticeWords> Collectives::reduce_scatter(const ReduceScatterOptions& options) const {
  check_reduce_scatter(group(), options.output, options.input);
  if (options.output.numel() == 0) return {};
  const BelowAutograd below_autograd;
  const auto operation =
      operation_of(CollectiveKind::kReduceScatter, options, bytes_in(options.input),
                   manner_of_reduction(options.op, options.input.scalar_type()));
  const auto carrier = state_->carrier(operation.kind, options.input, bytes_in(options.output));
  if (options.op != ReduceOp::kSum || carrier == Carrier::kBackend) {
    return log()->run(operation, [&] {
      return internal::reduce_scatter(group(), options.output, options.input, options.op);
    });
  }
  auto rows = options;
  rows.input = as_rows(options.input, size());
  rows.summands.dtype = options.input.scalar_type();
  if (carrier == Carrier::kMessages) rows.input = rows.input.clone();  // which are overwritten
  auto sum = (carrier == Carrier::kNotice
                  ? sum_by_notice(*this, operation, rows.input, rows.summands)
                  : reduce_scatter_by_messages(*this, operation, rows, Rounds::kInWait))
                 .wait();
  options.output.view({-1}).copy_(sum.row);
  return std::move(sum.words);
}

// Sums of booleans the backend knows.
std::vector<NoticeWords> Collectives::all_reduce(const AllReduceOptions& options) const {
  const auto& tensor = options.tensor;
  if (tensor.numel() == 0) return {};
  const BelowAutograd below_autograd;
  const auto operation = operation_of(CollectiveKind::kAllReduce, options, bytes_in(tensor),
                                      manner_of_reduction(options.op, tensor.scalar_type()));
  const auto carrier = state_->carrier(operation.kind, tensor, operation.bytes);
  if (options.op != ReduceOp::kSum || tensor.scalar_type() == at::kBool ||
      carrier == Carrier::kBackend) {
    return log()->run(operation, [&] { return internal::all_reduce(group(), tensor, options.op); });
  }
  const auto flat = tensor.view({-1});
  auto sum = (carrier == Carrier::kNotice
                  ? sum_by_notice(*this, operation, as_rows(flat, 1), Summands(flat.scalar_type()))
                  : all_reduce_by_messages(*this, operation, flat))
                 .wait();
  flat.copy_(sum.row);
  return std::move(sum.words);
}

// By notice in pieces, since the root copies what it sends: it is at most one of
// them ahead.
std::vector<NoticeWords> Collectives::broadcast(const BroadcastOptions& options) const {
  constexpr int64_t kPiece = 4 << 20;  // bytes
  check_broadcast(group(), options.root);
  if (options.tensor.numel() == 0) return {};
  const BelowAutograd below_autograd;
  const auto operation = operation_of(CollectiveKind::kBroadcast, options, bytes_in(options.tensor),
                                      manner_of_broadcast(options.root));
  if (state_->carrier(operation.kind, options.tensor, operation.bytes) == Carrier::kBackend) {
    return log()->run(operation,
                      [&] { return internal::broadcast(group(), options.tensor, options.root); });
  }
  const auto bytes = tensor_bytes(options.tensor);
  std::vector<NoticeWords> words;
  for (int64_t sent = 0; sent < bytes.numel(); sent += kPiece) {
    const auto piece = bytes.narrow(0, sent, std::min(kPiece, bytes.numel() - sent));
    const bool is_root = rank() == options.root;
    const auto rows =
        rows_by_notice(*this, operation, is_root ? as_rows(piece, 1) : at::Tensor()).wait();
    if (!is_root) std::memcpy(piece.mutable_data_ptr(), rows.row(options.root), piece.nbytes());
    words = rows.words();
  }
  return words;
}

std::vector<NoticeWords> Collectives::all_to_all(const AllToAllOptions& options) const {
  check_all_to_all(group(), options.output, options.input);
  if (options.input.numel() == 0) return {};
  const BelowAutograd below_autograd;
  const auto operation = operation_of(CollectiveKind::kAllToAll, options, bytes_in(options.input));
  if (state_->carrier(operation.kind, options.input, operation.bytes) == Carrier::kBackend) {
    return log()->run(operation,
                      [&] { return internal::all_to_all(group(), options.output, options.input); });
  }
  const auto rows = rows_by_notice(*this, operation, as_rows(options.input, size())).wait();
  copy_rows(rows, size(), options.output);
  return rows.words();
}

void Collectives::barrier(const std::string& what) const {
  const IssuedOperation operation = {.kind = CollectiveKind::kAllReduce, .what = what};
  if (state_->shares_memory()) {
    log()->announce(operation).wait();  // all have come
    return;
  }
  log()->run(operation, [&] { return internal::barrier(group()); });
}

}  // namespace fsdp::internal
