#include "fully_shard/transport/unordered_reductions.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/sum_in_order.h"
#include "device_mesh/peer_memory/peer_receive.h"
#include "fully_shard/transport/peer_waits.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

namespace fsdp::internal {
namespace {

using Sends = BackwardPlans::Sends;
using Kind = ReductionNumber::Kind;
using Words = std::vector<uint32_t>;

Words words_of(const at::Tensor& body) {
  const auto* const first = static_cast<const uint32_t*>(body.const_data_ptr());
  const auto count = static_cast<std::ptrdiff_t>(body.nbytes() / sizeof(uint32_t));
  return {first, first + count};
}

}  // namespace

UnorderedReductions::UnorderedReductions(std::shared_ptr<PeerChannel> channel,
                                         Collectives reductions)
    : channel_(std::move(channel)),
      reductions_(std::move(reductions)),
      told_(static_cast<size_t>(channel_->size())) {
  begin_step();
}

ReductionNumber UnorderedReductions::next(Kind kind) const {
  TORCH_CHECK(backward_ < ReductionNumber::kBackwards, "more than ", ReductionNumber::kBackwards,
              " backwards without a last one (set_is_last_backward); rank ",
              reductions_.log()->global_rank());
  return {.step = step_, .backward = backward_, .kind = kind};
}

void UnorderedReductions::tell(const ReductionNumber& number, const Words& words) {
  auto body = channel_->memory().memory(static_cast<int64_t>(words.size() * sizeof(uint32_t)));
  std::copy(words.begin(), words.end(), static_cast<uint32_t*>(body.mutable_data_ptr()));
  for (int64_t to = 0; to < ranks(); ++to) {
    if (to != rank()) channel_->send(to, number.in_channel(), {}, body);
  }
}

void UnorderedReductions::plan(uint32_t root, UnitNumbers units) {
  Words words = {root};
  words.insert(words.end(), units.begin(), units.end());
  auto number = next(Kind::kPlan);
  number.unit = plans_told_++;
  stage_ = Stage::kTold;
  tell(number, words);
  plans(backward_).add(rank(), {.root = root, .units = std::move(units)});
}

std::unique_ptr<UnorderedReduction> UnorderedReductions::send(Rows rows) {
  auto number = next(Kind::kRows);
  number.unit = rows.unit;
  number.round = rows.round;
  number.part = rows.part;
  TORCH_CHECK(number.is_possible(), "the ", rows.what, " is one too many: a process group has ",
              ReductionNumber::kUnits, " units at most, and a unit ", ReductionNumber::kParts,
              " dtypes (rank ", reductions_.log()->global_rank(), ")");
  reductions_.log()->check_usable(rows.what);
  stage_ = Stage::kTold;
  auto sum = std::make_unique<UnorderedReduction>(*this, number, rows.root, rows.dtype,
                                                  std::move(rows.what), rows.rows.size(1));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto sent = channel_->memory().as_sent(rows.rows);
  for (int64_t distance = 1; distance < ranks(); ++distance) {
    const auto to = (rank() + distance) % ranks();
    const auto row = sent.select(0, to);
    channel_->send(to, number.in_channel(), {}, row.numel() > 0 ? row : at::Tensor());
  }
  const auto own = static_cast<size_t>(rank());
  sum->own_rows_ = sent;
  sum->bodies_[own] = sent.select(0, rank());
  sum->state_[own] = UnorderedReduction::Row::kThere;
  return sum;
}

std::unique_ptr<UnorderedReduction> UnorderedReductions::join(const ReductionNumber& number,
                                                              int64_t bytes, at::ScalarType dtype,
                                                              std::string what) {
  return std::make_unique<UnorderedReduction>(*this, number, /*root=*/0, dtype, std::move(what),
                                              bytes);
}

BackwardPlans& UnorderedReductions::plans(uint32_t backward) {
  return plans_.try_emplace(backward, ranks()).first->second;
}

// All that a rank has told and this one has not heard.
void UnorderedReductions::hear(int64_t from) {
  for (const auto each : channel_->numbers_in(from, ReductionNumber::words_of(step_))) {
    const auto message = channel_->take(from, each);
    hear(from, ReductionNumber::of(each), words_of(message->body));
  }
}

void UnorderedReductions::hear(int64_t from, const ReductionNumber& number, const Words& words) {
  auto& told = told_[static_cast<size_t>(from)];
  switch (number.kind) {
    case Kind::kPlan:
      plans(number.backward)
          .add(from, {.root = words.front(), .units = {words.begin() + 1, words.end()}});
      break;
    case Kind::kEnd:
      told.ended = number.backward + 1;
      if (words.front() == static_cast<uint32_t>(Backward::kLast)) told.step_end = words.back();
      break;
    case Kind::kFailed:
      told.ended = number.backward + 1;
      told.failed.emplace(number.backward, words.front());
      told.resumes_at = words.back();
      break;
    case Kind::kRows:
      break;
  }
}

// The backward of that rank that belongs to the one of `reduction` has ended, or there is
// none.
bool UnorderedReductions::is_over(int64_t from, const UnorderedReduction& reduction) {
  hear(from);
  return reduction.number().backward < told_[static_cast<size_t>(from)].ended ||
         has_ended_step(from);
}

// After the last failure that this rank knows of: what it has told before is void.
bool UnorderedReductions::has_ended_step(int64_t from) const {
  const auto& end = told_[static_cast<size_t>(from)].step_end;
  return end && *end >= valid_from_;
}

Sends UnorderedReductions::planned(int64_t from, const UnorderedReduction& reduction) {
  const auto& number = reduction.number();
  if (number.round != 0) return Sends::kUnknown;
  return plans(number.backward).sends(from, reduction.root_, number.unit);
}

bool UnorderedReductions::may_still_send(int64_t from, const UnorderedReduction& reduction) {
  return !is_over(from, reduction) && planned(from, reduction) != Sends::kNo;
}

bool UnorderedReductions::has_told(int64_t from, const UnorderedReduction& reduction) {
  return from == rank() || is_over(from, reduction) || planned(from, reduction) != Sends::kUnknown;
}

bool UnorderedReductions::all_have_told(const UnorderedReduction& reduction) {
  for (int64_t each = 0; each < ranks(); ++each) {
    if (!has_told(each, reduction)) return false;
  }
  return true;
}

// Of a backward of that rank from this one's first valid one to `last`: the rank whose
// own backward has thrown.
std::optional<uint32_t> UnorderedReductions::failure_of(int64_t from, uint32_t last) const {
  const auto& failed = told_[static_cast<size_t>(from)].failed;
  const auto first = failed.lower_bound(valid_from_);
  return first == failed.end() || first->first > last ? std::nullopt : std::optional(first->second);
}

void UnorderedReductions::check_failures(uint32_t last) {
  for (int64_t each = 0; each < ranks(); ++each) {
    const auto culprit = failure_of(each, last);
    if (!culprit) continue;
    culprit_ = culprit;
    const auto& log = *reductions_.log();
    TORCH_CHECK(false, "the backward of rank ", log.ranks()[*culprit],
                " has thrown, so the gradients of this step cannot be reduced: they are dropped "
                "on all ranks, which may go on with the next step (rank ",
                log.global_rank(), ")");
  }
}

// False: it is not known what all ranks send, and not waited for any more.
bool UnorderedReductions::await_plans(const UnorderedReduction& reduction, Backward backward) {
  if (backward == Backward::kLast) {
    for (int64_t each = 0; each < ranks(); ++each) {
      const auto is_known = [&, each] {
        return has_told(each, reduction) || failure_of(each, backward_);
      };
      if (!is_known())
        await_peer(reductions_, each, channel_->wait_until(each, is_known), reduction.what_);
    }
    return true;
  }
  return patience_.await(*channel_, [&] { return all_have_told(reduction); });
}

bool UnorderedReductions::await(UnorderedReduction& reduction, Backward backward) {
  if (reduction.is_there()) {
    patience_.was_in_vain = false;
    return true;
  }
  if (reduction.number().round != 0 || !await_plans(reduction, backward)) return false;
  const bool waits = plans(reduction.number().backward).have_one_order();
  for (int64_t each = 0; waits && each < ranks(); ++each) {
    const auto has_come = [&, each] {
      return reduction.has_from(each) || failure_of(each, backward_);
    };
    if (!has_come())
      await_peer(reductions_, each, channel_->wait_until(each, has_come), reduction.what_);
  }
  // A rank that has thrown at the same place has sent what this one waits for.
  if (reduction.is_there()) return true;
  check_failures(backward_);
  return false;
}

void UnorderedReductions::end_backward() {
  if (stage_ != Stage::kTold) return;
  tell(next(Kind::kEnd), {static_cast<uint32_t>(Backward::kNotLast)});
  ++backward_;
  plans_told_ = 0;
  stage_ = Stage::kSilent;
}

void UnorderedReductions::await_end_of(int64_t from) {
  const auto has_ended = [&, from] {
    hear(from);
    return has_ended_step(from) || failure_of(from, ReductionNumber::kBackwards);
  };
  if (has_ended()) return;
  await_peer(reductions_, from, channel_->wait_until(from, has_ended),
             "reduction of the gradients at the end of the backward");
}

std::vector<ReductionNumber> UnorderedReductions::end_step(std::vector<ReductionNumber> sent) {
  stage_ = Stage::kTold;
  tell(next(Kind::kEnd), {static_cast<uint32_t>(Backward::kLast), valid_from_});
  for (int64_t each = 0; each < ranks(); ++each) {
    if (each == rank()) continue;
    await_end_of(each);
    check_failures(ReductionNumber::kBackwards);
  }
  stage_ = Stage::kStepOver;
  for (int64_t each = 0; each < ranks(); ++each) {
    if (each == rank()) continue;
    for (const auto number : channel_->numbers_in(each, ReductionNumber::rows_of(step_))) {
      if (const auto one = ReductionNumber::of(number); one.backward >= valid_from_)
        sent.push_back(one);
    }
  }
  std::map<std::pair<uint32_t, uint32_t>, size_t> places;  // of planned units, by backward
  for (const auto& [backward, plans] : plans_) {
    size_t place = 0;
    for (const auto unit : plans.order()) places[{backward, unit}] = place++;
  }
  const auto key = [&](const ReductionNumber& number) {
    const auto place =
        number.round == 0 ? places.at({number.backward, number.unit}) : size_t{number.unit};
    return std::tuple(number.backward, number.round, place, number.part);
  };
  std::sort(sent.begin(), sent.end(),
            [&](const auto& one, const auto& other) { return key(one) < key(other); });
  sent.erase(std::unique(sent.begin(), sent.end()), sent.end());
  return sent;
}

// What has come of earlier steps was for units, or a model, that are no more.
void UnorderedReductions::begin_step() {
  step_ = static_cast<uint32_t>(channel_->next_step() % ReductionNumber::kSteps);
  for (int64_t each = 0; each < ranks(); ++each) {
    if (each != rank()) channel_->drop_all_in(each, ReductionNumber::all_before(step_));
  }
  backward_ = valid_from_ = plans_told_ = 0;
  stage_ = Stage::kSilent;
  plans_.clear();
  told_.assign(told_.size(), {});
}

void UnorderedReductions::fail_backward() noexcept {
  try {
    if (stage_ == Stage::kStepOver) return begin_step();
    if (stage_ == Stage::kSilent) return;
    const auto failed = next(Kind::kFailed);
    valid_from_ = ++backward_;
    for (const auto& told : told_) valid_from_ = std::max(valid_from_, told.resumes_at);
    const auto culprit = std::exchange(culprit_, std::nullopt);
    tell(failed, {culprit.value_or(static_cast<uint32_t>(rank())), valid_from_});
  } catch (const std::exception&) {
    // No memory for it: the others learn when this rank leaves.
  }
  backward_ = valid_from_;
  plans_told_ = 0;
  stage_ = Stage::kSilent;
}

UnorderedReduction::UnorderedReduction(UnorderedReductions& owner, const ReductionNumber& number,
                                       uint32_t root, at::ScalarType dtype, std::string what,
                                       int64_t bytes)
    : owner_(owner),
      number_(number),
      root_(root),
      dtype_(dtype),
      what_(std::move(what)),
      bytes_(bytes),
      state_(static_cast<size_t>(owner.ranks()), Row::kAwaited),
      bodies_(static_cast<size_t>(owner.ranks())) {}

bool UnorderedReduction::has_from(int64_t rank) {
  auto& state = state_[static_cast<size_t>(rank)];
  if (state != Row::kAwaited) return true;
  if (rank == owner_.rank()) {
    state = Row::kNone;
    return true;
  }
  // Asked first: what that rank sent before it told so has come by then.
  const bool may_come = owner_.may_still_send(rank, *this);
  if (auto message = owner_.channel_->take(rank, number_.in_channel())) {
    auto& body = bodies_[static_cast<size_t>(rank)];
    body = message->body.defined() ? std::move(message->body) : at::empty({0}, at::kByte);
    state = Row::kThere;
  } else if (!may_come) {
    state = Row::kNone;
  }
  return state != Row::kAwaited;
}

bool UnorderedReduction::is_there() {
  bool all = true;
  for (int64_t rank = 0; rank < owner_.ranks(); ++rank) all = has_from(rank) && all;
  return all && (number_.round == 0 || owner_.stage_ == UnorderedReductions::Stage::kStepOver);
}

void UnorderedReduction::check_size(int64_t rank) const {
  const auto bytes = static_cast<int64_t>(bodies_[static_cast<size_t>(rank)].nbytes());
  if (bytes == bytes_) return;
  const auto& log = *owner_.reductions_.log();
  end_collectives(owner_.reductions_,
                  c10::str("the ", what_, " failed on rank ", log.global_rank(),
                           ": it adds up rows of ", bytes_, " bytes, and rank ",
                           log.ranks()[static_cast<size_t>(rank)], " has sent one of ", bytes,
                           ". The same parameters of a unit must be trained in the same dtype on "
                           "every rank"));
}

at::Tensor UnorderedReduction::take() {
  std::vector<at::Tensor> rows;
  for (int64_t rank = 0; rank < owner_.ranks(); ++rank) {
    const auto place = static_cast<size_t>(rank);
    if (state_[place] != Row::kThere) continue;
    check_size(rank);
    rows.push_back(std::exchange(bodies_[place], {}));
  }
  auto sum = sum_in_order(rows, dtype_);
  own_rows_.reset();
  return sum;
}

}  // namespace fsdp::internal
