#include "fully_shard/transport/c10d_transport.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/row_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <exception>
#include <utility>

namespace fsdp::internal {
namespace {

at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions().dtype(at::kByte).device(device);
}

// Runs `wait`; what it throws is what later collectives of the group are refused with.
template <class Wait>
auto watched(IssueLog& log, const Wait& wait) {
  try {
    return wait();
  } catch (const std::exception& error) {
    log.note_failure(error);
    throw;
  }
}

class C10dGather final : public Gather {
 public:
  C10dGather(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
             const at::Tensor& shards, std::string what)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        what_(std::move(what)),
        shards_(shards),
        checked_(shards.is_cpu()) {
    const auto size = group_size(group);
    if (size == 1) return;
    rows_ = at::empty({size, shards.numel()}, shards.options());
    pending_ = all_gather(group, rows_.view({-1}), shards);
  }
  ~C10dGather() override = default;

  int64_t staging_bytes() const override { return rows_.defined() ? rows_.numel() : 0; }

  GatheredRows wait() override {
    auto agreements = checked_ ? announcement_.wait() : std::vector<uint64_t>();
    watched(*log_, [&] { pending_.wait(what_); });
    const auto& rows = rows_.defined() ? rows_ : shards_;
    std::vector<const char*> pointers;
    const auto count = rows_.defined() ? rows_.size(0) : 1;
    for (int64_t r = 0; r < count; ++r)
      pointers.push_back(static_cast<const char*>(rows.const_data_ptr()) + r * shards_.numel());
    return {std::move(pointers), std::move(agreements), std::make_shared<at::Tensor>(rows)};
  }

 private:
  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  std::string what_;
  at::Tensor shards_, rows_;
  bool checked_;
  Pending pending_;  // last: waits before the buffers go
};

// The backend sums.
class BackendReduction final : public PendingReduction {
 public:
  BackendReduction(std::shared_ptr<IssueLog> log, const Group& group, const at::Tensor& rows,
                   at::ScalarType dtype, std::string what)
      : log_(std::move(log)),
        what_(std::move(what)),
        rows_(rows.view(dtype)),
        sum_(at::empty({rows_.size(1)}, rows_.options())),
        pending_(reduce_scatter(group, sum_, rows_.view({-1}), ReduceOp::kSum)) {}

  int64_t staging_bytes() const override {
    return static_cast<int64_t>(rows_.nbytes() + sum_.nbytes());
  }
  void progress() override {}
  at::Tensor wait() override {
    watched(*log_, [&] { pending_.wait(what_); });
    return sum_.to(sum_dtype(sum_.scalar_type()));
  }

 private:
  std::shared_ptr<IssueLog> log_;
  std::string what_;
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
        exchange_(group, rows, dtype, std::move(what)) {}

  int64_t staging_bytes() const override { return exchange_.staging_bytes(); }
  void progress() override {
    watched(*log_, [&] { exchange_.progress(); });
  }
  at::Tensor wait() override {
    announcement_.wait();
    return watched(*log_, [&] { return exchange_.wait(); });
  }

 private:
  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  RowExchange exchange_;
};

class C10dTransport final : public Transport {
 public:
  C10dTransport(const DeviceMesh& mesh, int64_t dim)
      : log_(IssueLog::of(mesh, dim)),
        gather_group_(mesh.group(dim)),
        reduce_group_(mesh.size(dim) == 1 ? gather_group_ : mesh.side_group(dim, "reduce")),
        on_cpu_(mesh.device_type() == c10::kCPU) {}

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
    return std::make_unique<C10dGather>(log_, announce(operation), gather_group_, shards,
                                        operation.what);
  }

  std::unique_ptr<PendingReduction> reduce(at::Tensor rows, at::ScalarType dtype,
                                           const Issue& issue) override {
    const auto operation =
        operation_of(CollectiveKind::kReduceScatter, "reduce-scatter", rows.size(1), issue);
    auto announcement = announce(operation);
    if (on_cpu_) {
      return std::make_unique<ExchangedReduction>(log_, std::move(announcement), reduce_group_,
                                                  rows, dtype, operation.what);
    }
    return std::make_unique<BackendReduction>(log_, reduce_group_, rows, dtype, operation.what);
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

  Announcement announce(const IssuedOperation& operation) {
    if (on_cpu_) return log_->announce(operation);
    log_->record(operation);
    return {};
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
