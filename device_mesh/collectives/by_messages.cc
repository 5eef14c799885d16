#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/backend/row_exchange.h"
#include "device_mesh/collectives/carriers.h"
#include "device_mesh/collectives/operations.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

// A message's tag comes from the stamp, so it is posted together with the notice, and
// meets only messages of the same operation.
struct Gathering {
  Gathering(const Collectives& on, const IssuedOperation& operation,
            const AllGatherOptions& options)
      : announcement(on.log()->announce(operation)),
        rows(on.group(), options.input, options.lengths, tag_of(announcement.stamp())) {}

  GatheredRows finish(IssueLog& log, const std::string& what, int64_t ranks) {
    try {
      auto words = announcement.wait();
      log.watch([&] { rows.wait(what); });
      std::vector<const char*> pointers;
      for (int64_t rank = 0; rank < ranks; ++rank) pointers.push_back(rows.row(rank));
      return {std::move(pointers), std::move(words), rows.memory()};
    } catch (...) {
      rows.abandon();
      throw;
    }
  }

  Announcement announcement;
  RowGather rows;
};

// Rows that are exchanged while the ranks agree on it.
struct Exchanging {
  Exchanging(const Collectives& on, const IssuedOperation& operation, const at::Tensor& rows,
             const Summands& summands, const std::vector<int64_t>& lengths, Rounds rounds)
      : announcement(on.log()->announce(operation)),
        exchange(on.group(), rows, summands,
                 {.what = operation.what,
                  .lengths = lengths,
                  .tag = tag_of(announcement.stamp()),
                  .agree = [this] { words = announcement.wait(); },
                  .rounds = rounds,
                  .awaited = announcement.awaited()}) {}

  Announcement announcement;
  std::vector<NoticeWords> words;  // of the exchange's thread until that ends
  RowExchange exchange;            // last: uses the others
};

// The row cut into one piece per rank, the last ones padded with zeros: uint8 [ranks,
// bytes].
at::Tensor pieces_of(const at::Tensor& row, int64_t ranks) {
  const auto piece = (row.numel() + ranks - 1) / ranks;
  auto pieces = at::zeros({ranks, piece}, row.options());
  pieces.view({-1}).narrow(0, 0, row.numel()).copy_(row);
  return pieces.view({-1}).view(at::kByte).view({ranks, -1});
}

// The pieces that the ranks have added up, behind one another.
at::Tensor joined(const Group& group, const at::Tensor& own, const std::string& what, int tag) {
  const auto bytes = own.view(at::kByte);
  RowGather pieces(group, bytes, /*lengths=*/{}, tag);
  pieces.wait(what);
  const auto ranks = group_size(group);
  auto row = at::empty({ranks * own.numel()}, own.options());
  auto* to = static_cast<char*>(row.mutable_data_ptr());
  for (int64_t rank = 0; rank < ranks; ++rank, to += bytes.numel())
    std::memcpy(to, pieces.row(rank), static_cast<size_t>(bytes.numel()));
  return row;
}

}  // namespace

InFlight<GatheredRows> all_gather_by_messages(const Collectives& on,
                                              const IssuedOperation& operation,
                                              const AllGatherOptions& options) {
  const auto gathering = std::make_shared<Gathering>(on, operation, options);
  const auto finish = [gathering, log = on.log(), what = options.what, ranks = on.size()] {
    return gathering->finish(*log, what, ranks);
  };
  return InFlight<GatheredRows>(finish, gathering->rows.staging_bytes());
}

InFlight<SummedRow> reduce_scatter_by_messages(const Collectives& on,
                                               const IssuedOperation& operation,
                                               const ReduceScatterOptions& options, Rounds rounds) {
  const auto exchanging = std::make_shared<Exchanging>(on, operation, options.input,
                                                       options.summands, options.lengths, rounds);
  const auto finish = [exchanging, log = on.log()] {
    auto row = log->watch([&] { return exchanging->exchange.wait(); });
    return SummedRow{std::move(row), exchanging->words};
  };
  return InFlight<SummedRow>(finish, exchanging->exchange.staging_bytes());
}

InFlight<SummedRow> all_reduce_by_messages(const Collectives& on, const IssuedOperation& operation,
                                           const at::Tensor& row) {
  const auto exchanging = std::make_shared<Exchanging>(
      on, operation, pieces_of(row, on.size()), Summands(row.scalar_type()), std::vector<int64_t>(),
      Rounds::kInBackground);
  const auto finish = [exchanging, log = on.log(), group = on.group(), what = operation.what,
                       elements = row.numel()] {
    auto sum = log->watch([&] {
      const auto own = exchanging->exchange.wait();
      return joined(group, own, what, tag_of(exchanging->announcement.stamp()));
    });
    return SummedRow{sum.narrow(0, 0, elements), exchanging->words};
  };
  return InFlight<SummedRow>(finish, exchanging->exchange.staging_bytes());
}

}  // namespace fsdp::internal
