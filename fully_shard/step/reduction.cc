#include "fully_shard/step/reduction.h"

#include "fully_shard/params/runtime_mode.h"

#include <ATen/record_function.h>

#include <utility>

namespace fsdp::internal {

Reduction::Reduction(c10::intrusive_ptr<ParamGroup> group, GradientBuffer buffer)
    : group_(std::move(group)), buffer_(std::move(buffer)) {}

Reduction::~Reduction() { take_pending(); }

std::unique_ptr<PendingReduction> Reduction::take_pending() {
  auto* const sent = std::get_if<Sent>(&stage_);
  if (sent == nullptr || !sent->pending) return nullptr;
  group_->accounts().add(&Counters::staging_bytes, -sent->staging_bytes);
  return std::move(sent->pending);
}

void Reduction::send(GradientBuffer::Late late) {
  RECORD_FUNCTION("fsdp::reduce_scatter(" + group_->name() + ")", {});
  auto pending = group_->dim().transport().reduce(buffer_.release_rows(late), buffer_.dtype(),
                                                  group_->issue(/*agreement=*/0));
  const auto bytes = pending->staging_bytes();
  group_->accounts().add(&Counters::staging_bytes, bytes);
  group_->accounts().count(&Counters::reduce_scatters);
  stage_.emplace<Sent>(Sent{std::move(pending), bytes});
}

void Reduction::progress() { std::get<Sent>(stage_).pending->progress(); }

void Reduction::receive() {
  const RuntimeMode runtime_mode;
  at::Tensor row;
  {
    const WaitClock clock(group_->accounts());
    row = take_pending()->wait();
  }
  stage_.emplace<Received>(Received{std::move(row)});
}

bool Reduction::announces_late() const { return buffer_.late(std::get<Received>(stage_).row); }

void Reduction::publish() {
  const auto row = std::exchange(std::get<Received>(stage_).row, {});
  const auto used = buffer_.used(row);
  if (group_->gradients().divisor() != 1) row.div_(group_->gradients().divisor());
  const auto& params = buffer_.params();
  for (size_t i = 0; i < params.size(); ++i) {
    if (!used[i]) continue;
    const auto part = buffer_.part(row, static_cast<int64_t>(i));
    const bool same = part.scalar_type() == buffer_.dtype();
    group_->gradients().publish(params[i].index, same ? part : part.to(buffer_.dtype()));
  }
}

}  // namespace fsdp::internal
