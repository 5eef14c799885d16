#include "device_mesh/collectives/start_gather.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/backend/row_exchange.h"
#include "device_mesh/collectives/scratch_memory.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

// Every row came with its rank's notice.
class RidingGather final : public Gather {
 public:
  explicit RidingGather(Announcement announcement) : announcement_(std::move(announcement)) {}

  int64_t staging_bytes() const override { return announcement_.staging_bytes(); }

  GatheredRows wait() override {
    auto words = announcement_.wait();
    auto rows = std::make_shared<std::vector<at::Tensor>>(announcement_.riders());
    std::vector<const char*> pointers;
    for (const auto& row : *rows)
      pointers.push_back(static_cast<const char*>(row.const_data_ptr()));
    return {std::move(pointers), std::move(words), std::move(rows)};
  }

 private:
  Announcement announcement_;
};

// Every row is a message of its own from its rank. Its tag comes from the stamp, so it is
// posted together with the notice, and meets only rows of the same gather.
class MessageGather final : public Gather {
 public:
  MessageGather(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
                const GatherOptions& options)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        what_(options.what),
        size_(group_size(group)),
        rows_(group, options.row, options.lengths, tag_of(announcement_.stamp())) {}
  ~MessageGather() override {
    try {
      if (!waited_) words_of_finished();
    } catch (const std::exception&) {
      // The group's next user is told.
    }
  }

  int64_t staging_bytes() const override { return rows_.staging_bytes(); }

  GatheredRows wait() override {
    auto words = words_of_finished();
    std::vector<const char*> pointers;
    for (int64_t rank = 0; rank < size_; ++rank) pointers.push_back(rows_.row(rank));
    return {std::move(pointers), std::move(words), rows_.memory()};
  }

 private:
  std::vector<NoticeWords> words_of_finished() {
    waited_ = true;
    try {
      auto words = announcement_.wait();
      log_->watch([&] { rows_.wait(what_); });
      return words;
    } catch (...) {
      rows_.abandon();
      throw;
    }
  }

  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  std::string what_;
  int64_t size_;
  RowGather rows_;
  bool waited_ = false;
};

// The user's all-gather, or the backend's. On devices nothing is announced.
class BackendGather final : public Gather {
 public:
  BackendGather(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
                const at::Tensor& row, const SendFunction* custom, std::string what)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        what_(std::move(what)),
        rows_(scratch_memory({group_size(group), row.numel()}, row.scalar_type(), row.device())),
        pending_(
            custom ? issue_on(row.device(), group, [&] { return (*custom)(rows_.view({-1}), row); })
                   : all_gather(group, rows_, row)) {}

  int64_t staging_bytes() const override { return rows_.numel(); }

  GatheredRows wait() override {
    auto words = announcement_.wait();
    log_->watch([&] { pending_.wait(what_); });
    if (!rows_.is_cpu()) words.clear();
    std::vector<const char*> pointers;
    const auto* first = static_cast<const char*>(rows_.const_data_ptr());
    for (int64_t r = 0; r < rows_.size(0); ++r) pointers.push_back(first + r * rows_.size(1));
    return {std::move(pointers), std::move(words), std::make_shared<at::Tensor>(rows_)};
  }

 private:
  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  std::string what_;
  at::Tensor rows_;
  Pending pending_;  // last: waits before the buffers go
};

}  // namespace

std::unique_ptr<Gather> start_gather(const std::shared_ptr<IssueLog>& log, const Group& group,
                                     const GatherOptions& options) {
  const auto& row = options.row;
  const IssuedOperation operation = {.kind = CollectiveKind::kAllGather,
                                     .unit = options.unit,
                                     .what = options.what,
                                     .bytes = row.numel(),
                                     .words = options.words};
  if (!options.custom && log->carries(row.numel())) {
    return std::make_unique<RidingGather>(log->announce(operation, row.view({1, -1})));
  }
  auto announcement = log->announce(operation);
  if (!options.custom && better_by_messages(group, row)) {
    return std::make_unique<MessageGather>(log, std::move(announcement), group, options);
  }
  return std::make_unique<BackendGather>(log, std::move(announcement), group, row, options.custom,
                                         options.what);
}

}  // namespace fsdp::internal
