#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/carriers.h"
#include "device_mesh/collectives/operations.h"
#include "device_mesh/collectives/scratch_memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <numeric>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// A collective of the backend, or what the user has in its place.
struct Posted {
  // Throws what failed, else gives the ranks' words.
  std::vector<NoticeWords> wait(IssueLog& log, const std::string& what) {
    auto words = announcement.wait();
    log.watch([&] { pending.wait(what); });
    return words;
  }

  Announcement announcement;
  at::Tensor output, input;
  Pending pending;  // last: waits before the buffers go
};

// Rows of bytes as what the backend adds: complex numbers in two parts.
at::Tensor summands_of(const at::Tensor& rows, at::ScalarType dtype) {
  const BelowAutograd below_autograd;
  const auto real = c10::toRealValueType(dtype);
  if (rows.numel() == 0) return rows.to(real);  // no view of another dtype is possible
  return rows.view(real).contiguous();
}

}  // namespace

// On devices announce() records what is issued, and sends no notice.
InFlight<GatheredRows> all_gather_by_backend(const Collectives& on,
                                             const IssuedOperation& operation,
                                             const AllGatherOptions& options) {
  const auto& row = options.input;
  const auto& group = on.group();
  auto announcement = on.log()->announce(operation);
  auto rows = scratch_memory({on.size(), row.numel()}, row.scalar_type(), row.device());
  auto pending = options.custom ? issue_on(row.device(), group,
                                           [&] { return (*options.custom)(rows.view({-1}), row); })
                                : all_gather(group, rows, row);
  const auto posted =
      std::make_shared<Posted>(Posted{std::move(announcement), rows, row, std::move(pending)});
  const auto finish = [posted, log = on.log(), what = options.what] {
    auto words = posted->wait(*log, what);
    const auto& rows = posted->output;
    if (!rows.is_cpu()) words.clear();
    std::vector<const char*> pointers;
    const auto* const first = static_cast<const char*>(rows.const_data_ptr());
    for (int64_t r = 0; r < rows.size(0); ++r) pointers.push_back(first + r * rows.size(1));
    return GatheredRows(std::move(pointers), std::move(words), std::make_shared<at::Tensor>(rows));
  };
  return InFlight<GatheredRows>(finish, rows.numel());
}

InFlight<SummedRow> reduce_scatter_by_backend(const Collectives& on,
                                              const IssuedOperation& operation,
                                              const ReduceScatterOptions& options) {
  const auto& group = on.group();
  const auto dtype = options.summands.dtype;
  // What the backend can not add, or would round at every step, each rank gets and adds
  // up.
  const bool is_moved = (options.summands.codes || sum_dtype(dtype) != dtype) && !options.custom;
  auto announcement = on.log()->announce(operation);
  const auto rows = is_moved ? options.input.contiguous() : summands_of(options.input, dtype);
  auto received = scratch_memory(is_moved ? rows.sizes() : rows.sizes().slice(1),
                                 rows.scalar_type(), rows.device());
  auto pending = is_moved ? all_to_all(group, received, rows)
                 : options.custom
                     ? issue_on(rows.device(), group,
                                [&] { return (*options.custom)(received, rows.view({-1})); })
                     : reduce_scatter(group, received, rows, ReduceOp::kSum);
  const auto posted =
      std::make_shared<Posted>(Posted{std::move(announcement), received, rows, std::move(pending)});
  const auto finish = [posted, is_moved, log = on.log(), what = options.what,
                       summands = options.summands] {
    auto words = posted->wait(*log, what);
    const BelowAutograd below_autograd;
    const auto& received = posted->output;
    auto sum = is_moved ? sum_in_order(received.unbind(0), summands)
                        : received.view(summands.dtype).to(sum_dtype(summands.dtype));
    return SummedRow{std::move(sum), std::move(words)};
  };
  return InFlight<SummedRow>(finish, static_cast<int64_t>(rows.nbytes() + received.nbytes()));
}

InFlight<SummedRow> all_reduce_by_backend(const Collectives& on, const IssuedOperation& operation,
                                          const at::Tensor& row) {
  auto announcement = on.log()->announce(operation);
  const auto summands = row.view(c10::toRealValueType(row.scalar_type()));
  const auto posted =
      std::make_shared<Posted>(Posted{std::move(announcement), summands, summands,
                                      all_reduce(on.group(), summands, ReduceOp::kSum)});
  const auto finish = [posted, log = on.log(), what = operation.what, dtype = row.scalar_type()] {
    auto words = posted->wait(*log, what);
    return SummedRow{posted->output.view(dtype), std::move(words)};
  };
  return InFlight<SummedRow>(finish, static_cast<int64_t>(row.nbytes()));
}

InFlight<std::vector<at::Tensor>> all_to_all_by_backend(const Collectives& on,
                                                        const IssuedOperation& operation,
                                                        const AllToAllOptions& options) {
  const auto& from = options.output_split_sizes;
  auto announcement = on.log()->announce(operation);
  auto received =
      at::empty({std::accumulate(from.begin(), from.end(), int64_t{0})}, options.input.options());
  auto pending =
      all_to_all_of_sizes(on.group(), received, options.input, from, options.input_split_sizes);
  const auto posted = std::make_shared<Posted>(
      Posted{std::move(announcement), received, options.input, std::move(pending)});
  const auto finish = [posted, log = on.log(), what = options.what, from] {
    posted->wait(*log, what);
    const BelowAutograd below_autograd;
    return posted->output.split_with_sizes(from);
  };
  return InFlight<std::vector<at::Tensor>>(finish, received.numel());
}

}  // namespace fsdp::internal
