#include "fully_shard/params/gradient_reduction.h"

#include "device_mesh/internal/profiler_range.h"
#include "fully_shard/params/runtime_mode.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

// As div_() does, which takes longer to begin than a small row takes to divide.
void divide(const at::Tensor& row, double divisor) {
  constexpr int64_t kSmall = 32 << 10;  // elements; more are worth several threads
  const bool is_real = row.scalar_type() == at::kFloat || row.scalar_type() == at::kDouble;
  if (!row.is_cpu() || !row.is_contiguous() || row.numel() > kSmall || !is_real) {
    row.div_(divisor);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES(row.scalar_type(), "division of gradients", [&] {
    auto* const first = row.mutable_data_ptr<scalar_t>();
    const auto by = static_cast<scalar_t>(divisor);
    std::for_each(first, first + row.numel(), [by](scalar_t& value) { value /= by; });
  });
}

// What an all-reduce brings from other ranks: terms of this rank's part, and the sums of
// the others'.
int64_t bytes_of_all_reduce(const at::Tensor& row, const Transport& replicas) {
  const auto ranks = replicas.shard_count();
  return 2 * (static_cast<int64_t>(row.nbytes()) / ranks) * (ranks - 1);
}

}  // namespace

GradientReduction::GradientReduction(c10::intrusive_ptr<FSDPParamGroup> group,
                                     ReduceScatterInput input)
    : group_(std::move(group)), input_(std::move(input)) {}

ReduceStream& GradientReduction::reduce_stream() const {
  return group_->info().comm_context().reduce_stream(group_->shards().member_device());
}

GradientReduction::~GradientReduction() {
  if (!group_) return;  // was moved
  const CurrentStream on_reduce_stream(reduce_stream().stream());
  take_pending<Sent>();
  take_pending<Shared>();
}

template <class Stage>
std::unique_ptr<PendingReduction> GradientReduction::take_pending() {
  auto* const stage = std::get_if<Stage>(&stage_);
  if (stage == nullptr || !stage->pending) return nullptr;
  group_->info().accounts().add(&Counters::staging_bytes, -stage->staging_bytes);
  return std::move(stage->pending);
}

template <class Stage>
void GradientReduction::put_in_flight(std::unique_ptr<PendingReduction> pending) {
  const auto bytes = pending->staging_bytes();
  group_->info().accounts().add(&Counters::staging_bytes, bytes);
  stage_.emplace<Stage>(Stage{std::move(pending), bytes});
}

template <class Stage>
at::Tensor GradientReduction::wait_for() {
  const WaitClock clock(group_->info().accounts());
  const auto pending = take_pending<Stage>();
  auto row = pending->wait();
  words_ = pending->words();
  return row;
}

void GradientReduction::send(ReduceScatterInput::Late late) {
  const CurrentStream on_reduce_stream(reduce_stream().stream());
  const auto ranks = group_->info().comm_context().shard_count();
  const auto bytes = input_.nbytes() / ranks * (ranks - 1);
  const ProfilerRange range("reduce_scatter", group_->info().name(), bytes);
  auto issue = group_->info().issue({}, &group_->info().unit().custom.reduce_scatter);
  const auto lengths = input_.lengths();
  issue.lengths = &lengths;
  put_in_flight<Sent>(group_->info().comm_context().transport().reduce(input_.release_rows(late),
                                                                       input_.dtype(), issue));
  group_->info().accounts().count(&Counters::reduce_scatters);
  group_->info().accounts().add(&Counters::reduce_scatter_bytes, bytes);
}

void GradientReduction::progress() { std::get<Sent>(stage_).pending->progress(); }

void GradientReduction::receive() {
  const RuntimeMode runtime_mode;
  const CurrentStream on_reduce_stream(reduce_stream().stream());
  auto row = wait_for<Sent>();
  auto& gradients = group_->gradients();
  if (group_->info().replicas() == nullptr) {
    receive_whole(std::move(row));
  } else if (gradients.settings().reduces_over_replicas()) {
    gradients.partial_output().add_to(input_, row);
    group_->info().has_pieces() ? send_pieces(row) : send_to_replicas(std::move(row));
  } else {
    stage_.emplace<Received>(Received{std::move(row), Received::Use::kKept});
  }
}

void GradientReduction::send_to_replicas(at::Tensor row) {
  const auto& info = group_->info();
  const auto bytes = bytes_of_all_reduce(row, *info.replicas());
  const ProfilerRange range("all_reduce", info.name(), bytes);
  info.accounts().count(&Counters::all_reduces);
  info.accounts().add(&Counters::all_reduce_bytes, bytes);
  put_in_flight<Shared>(info.replicas()->all_reduce(
      std::move(row), info.issue(group_->agreement().word_for_replicas())));
}

// Each outer rank gets the sum of its pieces of `row`, of the parameters that were used.
void GradientReduction::send_pieces(const at::Tensor& row) {
  const auto& info = group_->info();
  auto& outer = *info.replicas();
  pieces_.emplace(pieces_of(row), row.scalar_type(), outer, row.device());
  const auto bytes = pieces_->row_bytes() * (outer.shard_count() - 1);
  const ProfilerRange range("outer_reduce_scatter", info.name(), bytes);
  const auto used = input_.used(row);
  for (size_t i = 0; i < used.size(); ++i) {
    const auto position = static_cast<int64_t>(i);
    if (used[i]) pieces_->add(position, input_.part(row, position));
  }
  const auto late =
      input_.late(row) ? ReduceScatterInput::Late::kSome : ReduceScatterInput::Late::kNone;
  auto issue = info.issue({});
  const auto lengths = pieces_->lengths();
  issue.lengths = &lengths;
  put_in_flight<Shared>(outer.reduce(pieces_->release_rows(late), pieces_->dtype(), issue));
  info.accounts().count(&Counters::outer_reduce_scatters);
  info.accounts().add(&Counters::outer_reduce_scatter_bytes, bytes);
}

// What the outer ranks have of each parameter's inner shard, which the row is of.
std::vector<TrainableParam> GradientReduction::pieces_of(const at::Tensor& row) const {
  std::vector<TrainableParam> pieces;
  for (const auto& shard : input_.params()) {
    const auto& param = group_->params()[static_cast<size_t>(shard.index)];
    auto extent = param.meta().extent(row.scalar_type());
    extent.rows = shard.shard_shape[static_cast<size_t>(param.meta().cut().dim)];
    extent.cut = {.dim = param.meta().cut().dim};
    pieces.push_back({shard.index, extent, group_->shards().shape(shard.index, param)});
  }
  return pieces;
}

void GradientReduction::wait_for_replicas() {
  if (!std::holds_alternative<Shared>(stage_)) return;
  const RuntimeMode runtime_mode;
  const CurrentStream on_reduce_stream(reduce_stream().stream());
  receive_whole(wait_for<Shared>());
  if (pieces_) words_.clear();  // reduce-scatters carry none
}

const ReduceScatterInput& GradientReduction::input_of_row() const {
  return pieces_ ? *pieces_ : input_;
}

void GradientReduction::receive_whole(at::Tensor row) {
  group_->gradients().settings().run_hook(input_of_row(), row);
  stage_.emplace<Received>(Received{std::move(row), Received::Use::kPublish});
}

void GradientReduction::keep_unless_over_replicas() {
  const auto& [row, use] = std::get<Received>(stage_);
  if (use == Received::Use::kPublish) return;
  const RuntimeMode runtime_mode;
  const CurrentStream on_reduce_stream(reduce_stream().stream());
  const auto used = input_.used(row);
  for (size_t i = 0; i < used.size(); ++i) {
    const auto position = static_cast<int64_t>(i);
    if (!used[i]) continue;
    group_->gradients().partial_output().keep(input_.params()[i].index, input_.part(row, position));
  }
}

bool GradientReduction::is_over_replicas() const {
  return group_->info().replicas() != nullptr &&
         std::get<Received>(stage_).use == Received::Use::kPublish;
}

void GradientReduction::check_replica_writes() {
  if (is_over_replicas() && !words_.empty()) group_->agreement().check_replica_writes(words_);
}

bool GradientReduction::announces_late() const {
  return input_of_row().late(std::get<Received>(stage_).row);
}

std::optional<ReducedRow> GradientReduction::result() && {
  auto [row, use] = std::exchange(std::get<Received>(stage_), {});
  if (use == Received::Use::kKept) return std::nullopt;
  return std::optional<ReducedRow>(std::in_place, group_->info().unit().shared_from_this(),
                                   std::move(pieces_ ? *pieces_ : input_), std::move(row));
}

ReducedRow::ReducedRow(std::shared_ptr<Unit> unit, ReduceScatterInput input, at::Tensor row)
    : unit_(std::move(unit)), input_(std::move(input)), row_(std::move(row)) {}

// Null where it is gone.
c10::intrusive_ptr<FSDPParamGroup> ReducedRow::group() const {
  if (unit_->group() == nullptr) return {};
  return c10::intrusive_ptr<FSDPParamGroup>::reclaim_copy(unit_->group());
}

void ReducedRow::bring_home(CopiesToHost& copies) {
  const auto group = this->group();
  if (!group) return;
  group->info().comm_context().reduce_stream(row_.device()).await_results();
  const auto divisor = group->gradients().settings().divisor();
  if (divisor != 1) divide(input_.elements(row_), divisor);
  const auto& shards = group->shards();
  if (row_.device() == shards.device()) return;
  row_ = copies.add(
      row_, shards.is_pinned() ? CopiesToHost::Memory::kPinned : CopiesToHost::Memory::kPageable);
}

void ReducedRow::publish() {
  const auto row = std::exchange(row_, {});
  const auto group = this->group();
  if (!group) return;
  auto& gradients = group->gradients();
  const auto& params = input_.params();
  const auto used = gradients.settings().publishes_unused() ? std::vector<bool>(params.size(), true)
                                                            : input_.used(row);
  for (size_t i = 0; i < params.size(); ++i) {
    if (used[i]) gradients.publish(params[i].index, input_.part(row, static_cast<int64_t>(i)));
  }
  group->unsharded().source().shards_change();
}

}  // namespace fsdp::internal
