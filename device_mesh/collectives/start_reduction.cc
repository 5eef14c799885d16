#include "device_mesh/collectives/start_reduction.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/backend/row_exchange.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/collectives/sum_in_order.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// Rows of bytes as what the backend adds: complex numbers in two parts.
at::Tensor summands_of(const at::Tensor& rows, at::ScalarType dtype) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto real = c10::toRealValueType(dtype);
  if (rows.numel() == 0) return rows.to(real);  // no view of another dtype is possible
  return rows.view(real).contiguous();
}

// The user's reduce-scatter, or the backend's.
class BackendReduction final : public PendingReduction {
 public:
  BackendReduction(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
                   const at::Tensor& rows, at::ScalarType dtype, const SendFunction* custom,
                   std::string what)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        what_(std::move(what)),
        dtype_(dtype),
        rows_(summands_of(rows, dtype)),
        sum_(scratch_memory({rows_.size(1)}, rows_.scalar_type(), rows_.device())),
        pending_(custom ? issue_on(rows_.device(), group,
                                   [&] { return (*custom)(sum_, rows_.view({-1})); })
                        : reduce_scatter(group, sum_, rows_, ReduceOp::kSum)) {}

  int64_t staging_bytes() const override {
    return static_cast<int64_t>(rows_.nbytes() + sum_.nbytes());
  }
  at::Tensor wait() override {
    announcement_.wait();
    log_->watch([&] { pending_.wait(what_); });
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return sum_.view(dtype_).to(sum_dtype(dtype_));
  }

 private:
  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  std::string what_;
  at::ScalarType dtype_;
  at::Tensor rows_, sum_;
  Pending pending_;  // last: waits before the buffers go
};

// Every row came with its rank's notice.
class RiderSum final : public PendingReduction {
 public:
  RiderSum(Announcement announcement, at::ScalarType dtype)
      : announcement_(std::move(announcement)), dtype_(dtype) {}

  int64_t staging_bytes() const override { return announcement_.staging_bytes(); }
  at::Tensor wait() override {
    words_ = announcement_.wait();
    return sum_in_order(announcement_.riders(), dtype_);
  }
  std::vector<NoticeWords> words() const override { return words_; }

 private:
  Announcement announcement_;
  at::ScalarType dtype_;
  std::vector<NoticeWords> words_;
};

// The rows are exchanged and added here.
class ExchangedReduction final : public PendingReduction {
 public:
  ExchangedReduction(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
                     const SumRowsOptions& options)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        exchange_(group, options.rows, options.dtype,
                  {.what = options.what,
                   .lengths = options.lengths,
                   .tag = tag_of(announcement_.stamp()),
                   .agree = [this] { announcement_.wait(); },
                   .in_background = true,
                   .awaited = announcement_.awaited()}) {}

  int64_t staging_bytes() const override { return exchange_.staging_bytes(); }
  at::Tensor wait() override {
    return log_->watch([&] { return exchange_.wait(); });
  }

 private:
  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  RowExchange exchange_;  // last: uses the announcement
};

// The backend's all-reduce.
class BackendAllReduce final : public PendingReduction {
 public:
  BackendAllReduce(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
                   const at::Tensor& row, std::string what)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        what_(std::move(what)),
        dtype_(row.scalar_type()),
        row_(row.view(c10::toRealValueType(dtype_))),
        pending_(all_reduce(group, row_, ReduceOp::kSum)) {}

  int64_t staging_bytes() const override { return static_cast<int64_t>(row_.nbytes()); }
  at::Tensor wait() override {
    words_ = announcement_.wait();
    log_->watch([&] { pending_.wait(what_); });
    return row_.view(dtype_);
  }
  std::vector<NoticeWords> words() const override { return words_; }

 private:
  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  std::string what_;
  at::ScalarType dtype_;
  at::Tensor row_;
  std::vector<NoticeWords> words_;
  Pending pending_;  // last: waits before the buffers go
};

// The row cut into one piece per rank, the last ones padded with zeros: uint8 [ranks,
// bytes].
at::Tensor pieces_of(const at::Tensor& row, int64_t ranks) {
  const auto piece = (row.numel() + ranks - 1) / ranks;
  auto pieces = at::zeros({ranks, piece}, row.options());
  pieces.view({-1}).narrow(0, 0, row.numel()).copy_(row);
  return pieces.view({-1}).view(at::kByte).view({ranks, -1});
}

// Every rank adds up one piece and sends it to the others (Rabenseifner, "Optimization of
// collective reduction operations", 2004).
class ExchangedAllReduce final : public PendingReduction {
 public:
  ExchangedAllReduce(std::shared_ptr<IssueLog> log, Announcement announcement, Group group,
                     const at::Tensor& row, std::string what)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        group_(std::move(group)),
        what_(std::move(what)),
        dtype_(row.scalar_type()),
        elements_(row.numel()),
        exchange_(group_, pieces_of(row, group_size(group_)), dtype_,
                  {.what = what_,
                   .tag = tag_of(announcement_.stamp()),
                   .agree = [this] { words_ = announcement_.wait(); },
                   .in_background = true,
                   .awaited = announcement_.awaited()}) {}

  ~ExchangedAllReduce() override {
    try {
      if (!waited_) wait();  // the other ranks count on this one's piece
    } catch (const std::exception&) {
      // The group's next user is told.
    }
  }

  int64_t staging_bytes() const override { return exchange_.staging_bytes(); }
  at::Tensor wait() override {
    waited_ = true;
    return log_->watch([&] { return gathered(exchange_.wait().view(at::kByte)); });
  }
  std::vector<NoticeWords> words() const override { return words_; }

 private:
  at::Tensor gathered(const at::Tensor& piece) {
    RowGather pieces(group_, piece, /*lengths=*/{}, tag_of(announcement_.stamp()));
    pieces.wait(what_);
    const auto ranks = group_size(group_);
    auto sum = at::empty({ranks * piece.numel()}, piece.options());
    auto* to = static_cast<char*>(sum.mutable_data_ptr());
    for (int64_t rank = 0; rank < ranks; ++rank, to += piece.numel())
      std::memcpy(to, pieces.row(rank), static_cast<size_t>(piece.numel()));
    return sum.view(sum_dtype(dtype_)).narrow(0, 0, elements_);
  }

  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  Group group_;
  std::string what_;
  at::ScalarType dtype_;
  int64_t elements_;
  bool waited_ = false;
  std::vector<NoticeWords> words_;  // of the exchange's thread until that ends
  RowExchange exchange_;            // last: uses the announcement
};

}  // namespace

bool rides(const IssueLog& log, const Group& group, int64_t row_bytes) {
  return log.carries_any() || (group_size(group) == 2 && log.carries(row_bytes));
}

std::unique_ptr<PendingReduction> sum_of_riders(Announcement announcement, at::ScalarType dtype) {
  return std::make_unique<RiderSum>(std::move(announcement), dtype);
}

std::unique_ptr<PendingReduction> start_reduction(const std::shared_ptr<IssueLog>& log,
                                                  const Group& group,
                                                  const SumRowsOptions& options) {
  const auto& rows = options.rows;
  const IssuedOperation operation = {.kind = CollectiveKind::kReduceScatter,
                                     .unit = options.unit,
                                     .what = options.what,
                                     .bytes = rows.size(1)};
  if (!options.custom && rides(*log, group, rows.size(1))) {
    return sum_of_riders(log->announce(operation, rows), options.dtype);
  }
  auto announcement = log->announce(operation);
  if (!options.custom && better_by_messages(group, rows)) {
    return std::make_unique<ExchangedReduction>(log, std::move(announcement), group, options);
  }
  return std::make_unique<BackendReduction>(log, std::move(announcement), group, rows,
                                            options.dtype, options.custom, options.what);
}

std::unique_ptr<PendingReduction> start_row_sum(const std::shared_ptr<IssueLog>& log,
                                                const Group& group, const SumRowOptions& options) {
  const auto& row = options.row;
  const auto bytes = static_cast<int64_t>(row.nbytes());
  const IssuedOperation operation = {.kind = CollectiveKind::kAllReduce,
                                     .unit = options.unit,
                                     .what = options.what,
                                     .bytes = bytes,
                                     .words = options.words};
  // Both send all of a small row, and add.
  if (rides(*log, group, bytes)) {
    return sum_of_riders(log->announce(operation, tensor_bytes(row).view({1, -1})),
                         row.scalar_type());
  }
  auto announcement = log->announce(operation);
  if (better_by_messages(group, row)) {
    return std::make_unique<ExchangedAllReduce>(log, std::move(announcement), group, row,
                                                options.what);
  }
  return std::make_unique<BackendAllReduce>(log, std::move(announcement), group, row, options.what);
}

}  // namespace fsdp::internal
