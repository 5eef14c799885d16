#include "fully_shard/transport/c10d_gather.h"

#include "device_mesh/collectives/abandoned.h"
#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/point_to_point.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

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

}  // namespace

std::unique_ptr<Gather> issue_c10d_gather(const std::shared_ptr<IssueLog>& log,
                                          const IssuedOperation& operation, const Group& group,
                                          const at::Tensor& shards) {
  auto announcement = log->announce(operation);
  if (better_by_messages(group, shards)) {
    return std::make_unique<MessageGather>(log, std::move(announcement), group, shards,
                                           operation.what);
  }
  return std::make_unique<BackendGather>(log, std::move(announcement), group, shards,
                                         operation.what);
}

}  // namespace fsdp::internal
