#include "device_mesh/collectives/start_all_to_all.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>
#include <numeric>
#include <utility>

namespace fsdp::internal {
namespace {

using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

void check_splits(const Group& group, const AllToAllSplitOptions& options) {
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

std::vector<int64_t> offsets_of(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> offsets(sizes.size() + 1, 0);
  std::partial_sum(sizes.begin(), sizes.end(), offsets.begin() + 1);
  return offsets;
}

// Where what goes to each rank begins, and where the last one ends, then all of it:
// uint8 [1, bytes].
at::Tensor with_table(const Group& group, const AllToAllSplitOptions& options) {
  const BelowAutograd below_autograd;
  const auto offsets = offsets_of(options.input_split_sizes);
  const auto table = static_cast<int64_t>(offsets.size() * sizeof(int64_t));
  const auto shown = rider_memory(group, {1, table + options.input.numel()});
  auto* const first = static_cast<char*>(shown.mutable_data_ptr());
  std::memcpy(first, offsets.data(), static_cast<size_t>(table));
  if (options.input.numel() > 0)
    std::memcpy(first + table, options.input.const_data_ptr(), options.input.nbytes());
  return shown;
}

class RidingAllToAll final : public PendingAllToAll {
 public:
  RidingAllToAll(IssueLog& log, Announcement announcement, const Group& group,
                 std::vector<int64_t> from, std::string what)
      : announcement_(std::move(announcement)),
        from_(std::move(from)),
        what_(std::move(what)),
        ranks_(log.ranks()),
        rank_(group_rank(group)) {}

  std::vector<at::Tensor> wait() override {
    announcement_.wait();
    const BelowAutograd below_autograd;
    std::vector<at::Tensor> received;
    const auto riders = announcement_.riders();
    for (size_t rank = 0; rank < riders.size(); ++rank) received.push_back(own_part(riders, rank));
    return received;
  }

 private:
  at::Tensor own_part(const std::vector<at::Tensor>& riders, size_t rank) const {
    int64_t ends[2];
    std::memcpy(ends,
                static_cast<const char*>(riders[rank].const_data_ptr()) +
                    static_cast<size_t>(rank_) * sizeof(int64_t),
                sizeof(ends));
    TORCH_CHECK(ends[1] - ends[0] == from_[rank], what_, ": rank ", ranks_[rank], " has sent ",
                ends[1] - ends[0], " bytes where rank ", ranks_[static_cast<size_t>(rank_)],
                " expected ", from_[rank]);
    const auto table = static_cast<int64_t>((riders.size() + 1) * sizeof(int64_t));
    return riders[rank].narrow(0, table + ends[0], from_[rank]);
  }

  Announcement announcement_;
  std::vector<int64_t> from_;
  std::string what_;
  std::vector<int64_t> ranks_;  // of the job
  int64_t rank_;                // in the group
};

class BackendAllToAll final : public PendingAllToAll {
 public:
  BackendAllToAll(std::shared_ptr<IssueLog> log, Announcement announcement, const Group& group,
                  const AllToAllSplitOptions& options)
      : log_(std::move(log)),
        announcement_(std::move(announcement)),
        options_(options),
        received_(
            at::empty({offsets_of(options.output_split_sizes).back()}, options.input.options())),
        pending_(all_to_all_of_sizes(group, received_, options.input, options.output_split_sizes,
                                     options.input_split_sizes)) {}

  std::vector<at::Tensor> wait() override {
    announcement_.wait();
    log_->watch([&] { pending_.wait(options_.what); });
    const BelowAutograd below_autograd;
    return received_.split_with_sizes(options_.output_split_sizes);
  }

 private:
  std::shared_ptr<IssueLog> log_;
  Announcement announcement_;
  AllToAllSplitOptions options_;
  at::Tensor received_;
  Pending pending_;  // last: waits before the buffers go
};

}  // namespace

std::unique_ptr<PendingAllToAll> start_all_to_all(const std::shared_ptr<IssueLog>& log,
                                                  const Group& group,
                                                  const AllToAllSplitOptions& options,
                                                  uint32_t call) {
  check_splits(group, options);
  // Ranks send different numbers of bytes, so these are not compared.
  const IssuedOperation operation = {
      .kind = CollectiveKind::kAllToAll, .unit = call, .what = options.what};
  if (options.input.is_cpu() && log->carries_any()) {
    return std::make_unique<RidingAllToAll>(*log,
                                            log->announce(operation, with_table(group, options)),
                                            group, options.output_split_sizes, options.what);
  }
  return std::make_unique<BackendAllToAll>(log, log->announce(operation), group, options);
}

}  // namespace fsdp::internal
