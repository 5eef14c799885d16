#include "device_mesh/collectives/carriers.h"
#include "device_mesh/collectives/operations.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

std::vector<int64_t> offsets_of(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> offsets(sizes.size() + 1, 0);
  std::partial_sum(sizes.begin(), sizes.end(), offsets.begin() + 1);
  return offsets;
}

// Where what goes to each rank begins, and where the last one ends, then all of it:
// uint8 [1, bytes].
at::Tensor with_table(const Collectives& on, const AllToAllOptions& options) {
  const BelowAutograd below_autograd;
  const auto offsets = offsets_of(options.input_split_sizes);
  const auto table = static_cast<int64_t>(offsets.size() * sizeof(int64_t));
  const auto shown = on.row_memory({1, table + options.input.numel()}, c10::kCPU);
  auto* const first = static_cast<char*>(shown.mutable_data_ptr());
  std::memcpy(first, offsets.data(), static_cast<size_t>(table));
  if (options.input.numel() > 0)
    std::memcpy(first + table, options.input.const_data_ptr(), options.input.nbytes());
  return shown;
}

// The bytes that another rank, whose `shown` begins with a table for `ranks` of them, has
// for rank `own` of the group.
at::Tensor part_for(int64_t own, const at::Tensor& shown, size_t ranks) {
  int64_t ends[2];
  std::memcpy(
      ends,
      static_cast<const char*>(shown.const_data_ptr()) + static_cast<size_t>(own) * sizeof(int64_t),
      sizeof(ends));
  const auto table = static_cast<int64_t>((ranks + 1) * sizeof(int64_t));
  return shown.narrow(0, table + ends[0], ends[1] - ends[0]);
}

}  // namespace

InFlight<GatheredRows> rows_by_notice(const Collectives& on, const IssuedOperation& operation,
                                      const at::Tensor& rows) {
  const auto announcement = std::make_shared<Announcement>(on.log()->announce(operation, rows));
  const auto finish = [announcement] {
    auto words = announcement->wait();
    const auto payloads = std::make_shared<std::vector<at::Tensor>>(announcement->payloads());
    std::vector<const char*> pointers;
    for (const auto& row : *payloads) {
      pointers.push_back(row.defined() ? static_cast<const char*>(row.const_data_ptr()) : nullptr);
    }
    return GatheredRows(std::move(pointers), std::move(words), payloads);
  };
  return InFlight<GatheredRows>(finish, announcement->staging_bytes());
}

InFlight<SummedRow> sum_by_notice(const Collectives& on, const IssuedOperation& operation,
                                  const at::Tensor& rows, const Summands& summands) {
  const auto announcement = std::make_shared<Announcement>(on.log()->announce(operation, rows));
  const auto finish = [announcement, summands] {
    auto words = announcement->wait();
    return SummedRow{sum_in_order(announcement->payloads(), summands), std::move(words)};
  };
  return InFlight<SummedRow>(finish, announcement->staging_bytes());
}

InFlight<std::vector<at::Tensor>> all_to_all_by_notice(const Collectives& on,
                                                       const IssuedOperation& operation,
                                                       const AllToAllOptions& options) {
  const auto announcement =
      std::make_shared<Announcement>(on.log()->announce(operation, with_table(on, options)));
  const auto finish = [announcement, own = on.rank(), ranks = on.log()->ranks(),
                       expected = options.output_split_sizes, what = options.what] {
    announcement->wait();
    const BelowAutograd below_autograd;
    std::vector<at::Tensor> received;
    for (const auto& shown : announcement->payloads()) {
      const auto rank = received.size();
      received.push_back(part_for(own, shown, ranks.size()));
      TORCH_CHECK(received[rank].numel() == expected[rank], what, ": rank ", ranks[rank],
                  " has sent ", received[rank].numel(), " bytes where rank ",
                  ranks[static_cast<size_t>(own)], " expected ", expected[rank]);
    }
    return received;
  };
  return InFlight<std::vector<at::Tensor>>(finish, announcement->staging_bytes());
}

}  // namespace fsdp::internal
