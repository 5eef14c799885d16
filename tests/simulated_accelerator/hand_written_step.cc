#include "tests/simulated_accelerator/hand_written_step.h"

#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <optional>

namespace fsdp::testing::simulated {
namespace {

constexpr size_t kUnits = 3;

class HandWrittenStep {
 public:
  HandWrittenStep(Omitted omitted, c10::Device device)
      : omitted_(omitted),
        main_(current_stream(device)),
        gathers_(open_stream(device)),
        reductions_(open_stream(device)),
        other_(open_stream(device)),
        backend_(make_lone_backend({"by hand", 0, 2, {0, 1}, std::chrono::seconds(20)})) {
    for (size_t u = 0; u < kUnits; ++u) {
      const auto angles = at::arange(32 * 64, at::kFloat) * (0.37 * static_cast<double>(u + 1));
      shards_[u] = (angles.sin() * 0.2).view({32, 64}).to(device);
    }
    x_ = at::ones({4, 64}).to(device);
  }

  void run() {
    wait(Omitted::kGatherAfterWrites, mark(main_), gathers_);
    forward();
    backward();
    for (const auto& reduced : reduced_) wait(Omitted::kOptimizerAfterReductions, *reduced, main_);
    rows_.reset();
    for (size_t u = 0; u < kUnits; ++u) shards_[u].add_(grads_[u], -0.1);
    for (auto& grad : grads_) grad.reset();
  }

  at::Tensor shards() const { return at::stack({shards_[0], shards_[1], shards_[2]}).cpu(); }

 private:
  static c10::Event mark(const c10::Stream& stream) {
    c10::Event event(kDeviceType);
    event.record(stream);
    return event;
  }
  void wait(Omitted name, const c10::Event& event, const c10::Stream& stream) const {
    if (name != omitted_) event.block(stream);
  }

  void gather(size_t u) {
    // Before the stream allocates: the block of the last copy-out comes back.
    if (copied_) wait(Omitted::kGatherAfterCopyOut, *copied_, gathers_);
    const c10::StreamGuard on_gathers(gathers_);
    staging_[u] = at::empty({64, 64}, shards_[u].options());
    backend_->_allgather_base(staging_[u], shards_[u], {.asyncOp = false});
    gathered_[u].emplace(mark(gathers_));
  }

  // The copy-out, into memory of main.
  at::Tensor touch(size_t u) {
    wait(Omitted::kUseAfterGather, *gathered_[u], main_);
    auto full = staging_[u].clone();
    copied_.emplace(mark(main_));
    staging_[u].reset();
    return full;
  }

  void forward() {
    gather(0);
    for (size_t u = 0; u < kUnits; ++u) {
      if (u + 1 < kUnits) gather(u + 1);
      if (u == 1) {
        compute_on_two_streams(u);
      } else {
        x_ = x_.mm(touch(u)).tanh();
      }
    }
  }

  // With the waits that this needs without sharding too: for the input, and for the
  // result.
  void compute_on_two_streams(size_t u) {
    mark(main_).block(other_);
    const auto input = x_;
    auto full = touch(u);
    x_ = x_.mm(full).tanh();
    at::Tensor branch;
    std::optional<c10::Event> used;
    {
      const c10::StreamGuard on_other(other_);
      wait(Omitted::kOtherStreamAfterCopyOut, *copied_, other_);
      branch = input.mm(full);
      used.emplace(mark(other_));
    }
    wait(Omitted::kFreedAfterOtherStream, *used, main_);
    full.reset();
    const auto of_same_size = at::full_like(shards_[u], 3).repeat({2, 1});
    used->block(main_);
    x_ = x_ - branch * 0.1;
  }

  void backward() {
    gather(kUnits - 1);
    for (size_t u = kUnits; u-- > 0;) {
      if (u > 0) gather(u - 1);
      const auto gradient = (touch(u) * x_.sum()).tanh();
      if (rows_.defined()) wait(Omitted::kRowsFreedAfterReduction, *reduced_[u + 1], main_);
      rows_.reset();
      rows_ = gradient * 0.5;  // packed, into memory of main
      reduce(u);
    }
  }

  void reduce(size_t u) {
    const auto packed = mark(main_);
    const c10::StreamGuard on_reductions(reductions_);
    const bool allocates_early = omitted_ == Omitted::kAllocationAfterPacking;
    if (allocates_early) grads_[u] = at::empty_like(shards_[u]);
    wait(Omitted::kReductionAfterPacking, packed, reductions_);
    if (!allocates_early) grads_[u] = at::empty_like(shards_[u]);
    backend_->_reduce_scatter_base(grads_[u], rows_, {.asyncOp = false});
    reduced_[u].emplace(mark(reductions_));
  }

  Omitted omitted_;
  c10::Stream main_, gathers_, reductions_, other_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::array<at::Tensor, kUnits> shards_, grads_, staging_;
  std::array<std::optional<c10::Event>, kUnits> gathered_, reduced_;
  std::optional<c10::Event> copied_;
  at::Tensor rows_, x_;
};

}  // namespace

at::Tensor hand_written_steps(Omitted omitted, c10::Device device) {
  HandWrittenStep step(omitted, device);
  step.run();
  step.run();
  return step.shards();
}

}  // namespace fsdp::testing::simulated
