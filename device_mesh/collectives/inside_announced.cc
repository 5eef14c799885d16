#include "device_mesh/collectives/inside_announced.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/backend/row_exchange.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

// As c10d has it; `finish`, if any, runs when the collective succeeded.
class PendingWork final : public c10d::Work {
 public:
  PendingWork(Pending pending, std::string what, std::function<void()> finish)
      : pending_(std::move(pending)), what_(std::move(what)), finish_(std::move(finish)) {}

  bool isCompleted() override { return pending_.finished(); }
  bool wait(std::chrono::milliseconds) override {
    pending_.wait(what_);
    if (const auto finish = std::exchange(finish_, {})) finish();
    return true;
  }

 private:
  Pending pending_;
  std::string what_;
  std::function<void()> finish_;
};

// The exchange overwrites them.
at::Tensor copied_rows(const Group& group, const at::Tensor& input) {
  return input.clone().view({group_size(group), -1}).view(at::kByte);
}

class ExchangeWork final : public c10d::Work {
 public:
  ExchangeWork(const Group& group, const at::Tensor& output, const at::Tensor& input,
               std::function<void()> finish)
      : output_(output),
        exchange_(group, copied_rows(group, input), Summands(input.scalar_type()),
                  {.what = "reduce-scatter", .rounds = RowExchangeOptions::Rounds::kInBackground}),
        finish_(std::move(finish)) {}

  bool isCompleted() override { return waited_; }
  bool wait(std::chrono::milliseconds) override {
    if (std::exchange(waited_, true)) return true;
    output_.view({-1}).copy_(exchange_.wait());
    if (finish_) finish_();
    return true;
  }

 private:
  at::Tensor output_;
  RowExchange exchange_;
  std::function<void()> finish_;
  bool waited_ = false;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> all_gather_inside(const Group& group, const at::Tensor& output,
                                                 const at::Tensor& input) {
  return c10::make_intrusive<PendingWork>(all_gather(group, output, input), "all-gather",
                                          std::function<void()>());
}

c10::intrusive_ptr<c10d::Work> reduce_scatter_inside(const Group& group, const at::Tensor& output,
                                                     const at::Tensor& input,
                                                     std::function<void()> finish) {
  if (better_by_messages(group, input))
    return c10::make_intrusive<ExchangeWork>(group, output, input, std::move(finish));
  return c10::make_intrusive<PendingWork>(reduce_scatter(group, output, input, ReduceOp::kSum),
                                          "reduce-scatter", std::move(finish));
}

}  // namespace fsdp::internal
