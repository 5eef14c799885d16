#include "fully_shard/step/reductions_by_unit.h"

#include "device_mesh/internal/profiler_range.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
namespace {

// The same on all ranks: the first unit of the root that shards over the dimension.
uint32_t number_of(const Root& root, const CommContext& comm_context) {
  for (const auto& [unit, group] : root.groups()) {
    if (&group->info().comm_context() == &comm_context) return group->info().number();
  }
  return 0;
}

std::string in_words(const FSDPParamGroup& group) {
  return internal::in_words(group.info().issue({}));
}

}  // namespace

ReductionsByUnit::ReductionsByUnit(CommContext& comm_context, UnorderedReductions& reductions)
    : Reductions(Reach::kEverywhere), comm_context_(comm_context), reductions_(reductions) {}

bool ReductionsByUnit::can_reduce(FSDPParamGroup& group) {
  return group.info().replicas() == nullptr && !group.info().unit().custom.reduce_scatter;
}

void ReductionsByUnit::begin(Reach reach) {
  reach_ = reach;
  order_ = {};
  roots_.clear();
  planned_.clear();
  rounds_.clear();
  late_.clear();
  waits_ = Waits::kAsNeeded;
  has_ended_step_ = false;
}

void ReductionsByUnit::meet(const std::shared_ptr<Root>& root,
                            const std::vector<FSDPParamGroup*>& owing) {
  Reductions::meet(root, owing);
  roots_.insert(root);
  if (owing.empty()) return;
  planned_.insert(owing.begin(), owing.end());
  UnitNumbers units;
  for (const auto* group : owing) units.push_back(group->info().number());
  reductions_.plan(number_of(*root, comm_context_), std::move(units));
}

UnorderedReductions::Backward ReductionsByUnit::backward() const {
  const bool is_last = std::any_of(roots_.begin(), roots_.end(),
                                   [](const auto& root) { return root->is_last_backward(); });
  return is_last ? UnorderedReductions::Backward::kLast : UnorderedReductions::Backward::kNotLast;
}

ReductionsByUnit::Staging::Staging(const GroupAccounts& accounts, int64_t bytes)
    : accounts_(accounts), bytes_(bytes) {
  accounts_.add(&Counters::staging_bytes, bytes_);
}

ReductionsByUnit::Staging::Staging(Staging&& from) noexcept
    : accounts_(std::move(from.accounts_)), bytes_(std::exchange(from.bytes_, 0)) {}

ReductionsByUnit::Staging::~Staging() {
  if (bytes_ != 0) accounts_.add(&Counters::staging_bytes, -bytes_);
}

int64_t ReductionsByUnit::send_parts(FSDPParamGroup& group) {
  const auto& info = group.info();
  auto inputs = take_rows(group);
  const auto first = rounds_.try_emplace(&group, planned_.contains(&group) ? 0 : 1).first;
  const auto round = first->second++;
  uint32_t part = 0;
  for (auto& input : inputs) {
    receive_what_has_come();
    const auto bytes = input.nbytes() / reductions_.ranks() * (reductions_.ranks() - 1);
    const ProfilerRange range("reduce_scatter", info.name(), bytes);
    auto rows = input.release_rows(ReduceScatterInput::Late::kNone);
    auto sum = reductions_.send({.root = number_of(*info.unit().root(), comm_context_),
                                 .unit = info.number(),
                                 .round = round,
                                 .part = part++,
                                 .rows = std::move(rows),
                                 .dtype = input.dtype(),
                                 .what = "reduce-scatter of " + in_words(group)});
    step_.push_back({info.unit().shared_from_this(), std::move(input), std::move(sum)});
    step_.back().staging.emplace(info.accounts(), step_.back().sum->staging_bytes());
    info.accounts().count(&Counters::reduce_scatters);
    info.accounts().add(&Counters::reduce_scatter_bytes, bytes);
  }
  return part;
}

void ReductionsByUnit::receive(OnTheWay& reduction) {
  const bool is_there = reduction.sum->is_there();
  TORCH_INTERNAL_ASSERT(is_there);
  reduction.row = reduction.sum->take();
  reduction.staging.reset();
}

void ReductionsByUnit::receive_what_has_come() {
  for (auto& reduction : step_) {
    if (reduction.row.defined()) continue;
    const WaitClock clock(reduction.unit->group()->info().accounts());  // remove() drops others
    const bool is_there = waits_ == Waits::kAsNeeded ? reductions_.await(*reduction.sum, backward())
                                                     : reduction.sum->is_there();
    if (is_there) receive(reduction);
  }
}

void ReductionsByUnit::send_late() {
  for (auto* group : order_.groups()) {
    if (late_.erase(group) == 0) continue;
    group->info().accounts().add(&Counters::late_reduce_scatters, send_parts(*group));
  }
}

std::vector<ReducedRow> ReductionsByUnit::finish() {
  std::vector<ReducedRow> rows;
  if (!order_.groups().empty()) {
    send_all();
    send_late();
    backward() == UnorderedReductions::Backward::kLast ? void(rows = end_step()) : end_backward();
  }
  roots_.clear();
  return rows;
}

void ReductionsByUnit::end_backward() {
  receive_what_has_come();
  reductions_.end_backward();
}

// Nothing where the unit is gone.
std::optional<ReductionsByUnit::OnTheWay> ReductionsByUnit::join(const ReductionNumber& number) {
  auto unit = comm_context_.unit(number.unit);
  auto* const group = unit == nullptr ? nullptr : unit->group();
  if (group == nullptr || group->info().number() != number.unit) return std::nullopt;
  auto inputs = group->gradients().take(ReduceScatterInput::Rows::kNone);
  TORCH_CHECK(number.part < inputs.size(), "other ranks have trained parameters of ",
              in_words(*group), " that are frozen on rank ", comm_context_.global_rank(),
              ": set requires_grad alike on all ranks");
  auto& input = inputs[number.part];
  auto sum = reductions_.join(number, input.row_bytes(), input.dtype(),
                              "reduce-scatter of " + in_words(*group));
  return OnTheWay{std::move(unit), std::move(input), std::move(sum)};
}

// Of all ranks; the wait for them counts for the last unit that sent.
std::vector<ReductionNumber> ReductionsByUnit::await_end_of_step(
    std::vector<ReductionNumber> sent) {
  const WaitClock clock(order_.groups().back()->info().accounts());
  return reductions_.end_step(std::move(sent));
}

// Sums, and the users' hooks, in one order on all ranks.
std::vector<ReducedRow> ReductionsByUnit::end_step() {
  std::map<ReductionNumber, OnTheWay> own;
  std::vector<ReductionNumber> sent;
  for (auto& reduction : std::exchange(step_, {})) {
    sent.push_back(reduction.sum->number());
    own.emplace(sent.back(), std::move(reduction));
  }
  std::vector<ReducedRow> rows;
  for (const auto& number : await_end_of_step(std::move(sent))) {
    auto found = own.extract(number);
    auto reduction = found.empty() ? join(number) : std::optional(std::move(found.mapped()));
    if (!reduction || reduction->unit->group() == nullptr) continue;
    if (!reduction->row.defined()) receive(*reduction);
    reduction->unit->group()->gradients().settings().run_hook(reduction->input, reduction->row);
    rows.emplace_back(std::move(reduction->unit), std::move(reduction->input),
                      std::move(reduction->row));
  }
  reductions_.begin_step();
  has_ended_step_ = true;
  return rows;
}

void ReductionsByUnit::remove(FSDPParamGroup& group) {
  Reductions::remove(group);
  late_.erase(&group);
  std::erase_if(step_, [&](const auto& each) { return each.unit.get() == &group.info().unit(); });
}

void ReductionsByUnit::abort() noexcept {
  reductions_.fail_backward();
  step_.clear();
  roots_.clear();
}

}  // namespace fsdp::internal
