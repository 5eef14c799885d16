#include "fully_shard/transport/c10d_transport.h"

#include "device_mesh/collectives/abandoned.h"
#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/point_to_point.h"
#include "device_mesh/collectives/ranks_in_job.h"
#include "device_mesh/collectives/row_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <utility>

namespace fsdp::internal {
namespace {

at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions().dtype(at::kByte).device(device);
}

// Where the rows of a gather lie: this rank's in its shard memory, the others' behind one
// another in `received`, in the order of the ranks.
struct Rows {
  at::Tensor shards, received;
};

GatheredRows readable(const std::shared_ptr<const Rows>& rows, int64_t rank, int64_t size,
                      std::vector<uint64_t> agreements) {
  const auto bytes = rows->shards.numel();
  const auto* own = static_cast<const char*>(rows->shards.const_data_ptr());
  const auto* next = size > 1 ? static_cast<const char*>(rows->received.const_data_ptr()) : nullptr;
  std::vector<const char*> pointers;
  for (int64_t r = 0; r < size; ++r) {
    pointers.push_back(r == rank ? own : next);
    if (r != rank) next += bytes;
  }
  return {std::move(pointers), std::move(agreements), rows};
}

// Every row is a message of its own from its rank. Its tag comes from the stamp, so it is
// posted together with the notice, and meets only rows of the same gather.
class MessageGather final : public Gather {
 public:
  MessageGather(std::shared_ptr<IssueLog> log, Announcement announcement, Group group,
                const at::Tensor& shards, std::string what)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        group_(std::move(group)),
        what_(std::move(what)),
        rank_(group_rank(group_)),
        size_(group_size(group_)),
        rows_(std::make_shared<Rows>(
            Rows{shards, at::empty({size_ - 1, shards.numel()}, shards.options())})) {
    if (shards.numel() > 0) post(tag_of(announcement_.stamp()));
  }
  ~MessageGather() override {
    try {
      if (!waited_) agreements_of_finished();
    } catch (const std::exception&) {
      // The group's next user is told.
    }
  }

  int64_t staging_bytes() const override { return rows_->received.numel(); }

  GatheredRows wait() override {
    auto agreements = agreements_of_finished();
    return readable(rows_, rank_, size_, std::move(agreements));
  }

 private:
  void post(int tag) {
    for (int64_t distance = 1; distance < size_; ++distance) {
      const auto from = (rank_ + size_ - distance) % size_;
      messages_.push_back(
          receive(group_, rows_->received.select(0, from < rank_ ? from : from - 1), from, tag));
    }
    for (int64_t distance = 1; distance < size_; ++distance)
      messages_.push_back(send(group_, rows_->shards, (rank_ + distance) % size_, tag));
  }

  std::vector<uint64_t> agreements_of_finished() {
    waited_ = true;
    try {
      auto agreements = announcement_.wait();
      log_->watch([&] {
        for (auto& message : messages_) message.wait(what_);
      });
      return agreements;
    } catch (...) {
      for (auto& message : messages_) abandon(group_, message, rows_);
      throw;
    }
  }

  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  Group group_;
  std::string what_;
  int64_t rank_, size_;
  std::shared_ptr<const Rows> rows_;
  std::vector<Pending> messages_;
  bool waited_ = false;
};

// The backend's all-gather. On devices nothing is announced.
class BackendGather final : public Gather {
 public:
  BackendGather(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
                const at::Tensor& shards, std::string what)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        what_(std::move(what)),
        rows_(at::empty({group_size(group), shards.numel()}, shards.options())),
        pending_(all_gather(group, rows_.view({-1}), shards)) {}

  int64_t staging_bytes() const override { return rows_.numel(); }

  GatheredRows wait() override {
    auto agreements = announcement_.wait();
    log_->watch([&] { pending_.wait(what_); });
    if (!rows_.is_cpu()) agreements.clear();
    std::vector<const char*> pointers;
    const auto* first = static_cast<const char*>(rows_.const_data_ptr());
    for (int64_t r = 0; r < rows_.size(0); ++r) pointers.push_back(first + r * rows_.size(1));
    return {std::move(pointers), std::move(agreements), std::make_shared<at::Tensor>(rows_)};
  }

 private:
  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  std::string what_;
  at::Tensor rows_;
  Pending pending_;  // last: waits before the buffers go
};

// The backend's reduce-scatter.
class BackendReduction final : public PendingReduction {
 public:
  BackendReduction(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
                   const at::Tensor& rows, at::ScalarType dtype, std::string what)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        what_(std::move(what)),
        dtype_(dtype),
        rows_(rows.view(c10::toRealValueType(dtype)).contiguous()),
        sum_(at::empty({rows_.size(1)}, rows_.options())),
        pending_(reduce_scatter(group, sum_, rows_.view({-1}), ReduceOp::kSum)) {}

  int64_t staging_bytes() const override {
    return static_cast<int64_t>(rows_.nbytes() + sum_.nbytes());
  }
  void progress() override {}
  at::Tensor wait() override {
    announcement_.wait();
    log_->watch([&] { pending_.wait(what_); });
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

// The rows are exchanged and added here.
class ExchangedReduction final : public PendingReduction {
 public:
  ExchangedReduction(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
                     const at::Tensor& rows, at::ScalarType dtype, std::string what)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        exchange_(group, rows, dtype,
                  {.what = std::move(what),
                   .tag = tag_of(announcement_.stamp()),
                   .agree = [this] { announcement_.wait(); },
                   .in_background = true}) {}

  int64_t staging_bytes() const override { return exchange_.staging_bytes(); }
  void progress() override {}  // the exchange goes on by itself
  at::Tensor wait() override {
    return log_->watch([&] { return exchange_.wait(); });
  }

 private:
  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  RowExchange exchange_;  // last: uses the announcement
};

class C10dTransport final : public Transport {
 public:
  C10dTransport(const DeviceMesh& mesh, int64_t dim)
      : log_(IssueLog::of(mesh, dim)),
        gather_group_(mesh.group(dim)),
        reduce_group_(mesh.size(dim) == 1 ? gather_group_ : mesh.side_group(dim, "reduce")),
        on_cpu_(mesh.device_type() == c10::kCPU) {
    set_ranks_in_job(reduce_group_, ranks_in_job(gather_group_));
  }

  int64_t shard_rank() const override { return group_rank(gather_group_); }
  int64_t shard_count() const override { return group_size(gather_group_); }

  at::Tensor shard_memory(int64_t bytes, c10::Device device) override {
    return at::zeros({bytes}, bytes_on(device));
  }
  at::Tensor row_memory(int64_t row_bytes, c10::Device device) override {
    return at::empty({shard_count(), row_bytes}, bytes_on(device));
  }

  std::unique_ptr<Gather> gather(const at::Tensor& shards, const Issue& issue) override {
    const auto operation =
        operation_of(CollectiveKind::kAllGather, "all-gather", shards.numel(), issue);
    auto announcement = log_->announce(operation);
    if (by_messages(gather_group_, shards)) {
      return std::make_unique<MessageGather>(log_, std::move(announcement), gather_group_, shards,
                                             operation.what);
    }
    return std::make_unique<BackendGather>(log_, std::move(announcement), gather_group_, shards,
                                           operation.what);
  }

  std::unique_ptr<PendingReduction> reduce(at::Tensor rows, at::ScalarType dtype,
                                           const Issue& issue) override {
    const auto operation =
        operation_of(CollectiveKind::kReduceScatter, "reduce-scatter", rows.size(1), issue);
    auto announcement = log_->announce(operation);
    if (by_messages(reduce_group_, rows)) {
      return std::make_unique<ExchangedReduction>(log_, std::move(announcement), reduce_group_,
                                                  rows, dtype, operation.what);
    }
    return std::make_unique<BackendReduction>(log_, std::move(announcement), reduce_group_, rows,
                                              dtype, operation.what);
  }

  bool checks_stamps() const override { return on_cpu_; }
  bool reads_flags() const override { return on_cpu_; }

 private:
  static IssuedOperation operation_of(CollectiveKind kind, const char* name, int64_t bytes,
                                      const Issue& issue) {
    return {.kind = kind,
            .unit = issue.unit,
            .what = c10::str(name, " of unit '", issue.unit_name, "'"),
            .bytes = bytes,
            .agreement = issue.agreement};
  }

  // With nobody to talk to there is nothing to be sent either.
  static bool by_messages(const Group& group, const at::Tensor& memory) {
    return memory.is_cpu() && (group_size(group) == 1 || through_gloo(group, memory));
  }

  std::shared_ptr<IssueLog> log_;
  Group gather_group_, reduce_group_;
  bool on_cpu_;
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(const DeviceMesh& mesh, int64_t dim) {
  return std::make_unique<C10dTransport>(mesh, dim);
}

}  // namespace fsdp::internal
