#define XXH_INLINE_ALL
#include "fully_shard/params/reduce_scatter.h"

#include "device_mesh/internal/profiler_range.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "fully_shard/params/fsdp_param_group.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/params/sharded_grad.h"
#include "fully_shard/transport/packed_copy.h"

#include <ATen/Dispatch.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/strides.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::internal {
namespace {

std::vector<ShardExtent> extents_of(const std::vector<TrainableParam>& params) {
  std::vector<ShardExtent> extents;
  extents.reserve(params.size());
  for (const auto& param : params) extents.push_back(param.extent);
  return extents;
}

int64_t bytes_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// Without a graph or a base. Made by hand, since there are as many as parameters.
at::Tensor view_of(const at::Tensor& row, at::IntArrayRef shape, int64_t offset) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(row.storage()), row.key_set(), row.dtype());
  impl->set_sizes_and_strides(shape, c10::contiguous_strides(shape), offset);
  return at::Tensor(std::move(impl));
}

// Operators would take longer than all else that is done with a few flags.
template <class Scalar>
void write_raised(const std::vector<bool>& raised, void* to) {
  for (size_t i = 0; i < raised.size(); ++i)
    static_cast<Scalar*>(to)[i] = Scalar(raised[i] ? 1 : 0);
}

template <class Scalar>
std::vector<bool> read_raised(const void* from, int64_t count) {
  std::vector<bool> raised;
  const auto* const first = static_cast<const Scalar*>(from);
  for (int64_t i = 0; i < count; ++i) raised.push_back(first[i] != Scalar(0));
  return raised;
}

// Blocks that share a scale have elements of one parameter.
int64_t alignment_of(const GatherCodec* codec, at::ScalarType dtype) {
  return codec == nullptr ? kAlignment : RowCodes::kElementsOfABlock * bytes_of(dtype);
}

bool is_replicated(const FSDPParam& param) {
  const auto& member = param.meta().member_spec();
  return member && member->placements()[0].is_replicate() && member->mesh().size() > 1;
}

// Of all alike, since the unit's gradients are divided together.
int64_t batches_of(const std::vector<FSDPParam>& params, int64_t rank) {
  const auto batches = params.front().meta().batches();
  for (const auto& param : params)
    TORCH_CHECK_VALUE(param.meta().batches() == batches, "fully_shard: '", params.front().name(),
                      "' and '", param.name(), "' are of one unit, but one is ExpertParallel and ",
                      "one is not: give the module of the experts a unit of its own (rank ", rank,
                      ")");
  return batches;
}

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

ReduceScatterInput::ReduceScatterInput(std::vector<TrainableParam> params, at::ScalarType dtype,
                                       Transport& transport, c10::Device device,
                                       const GatherCodec* codec)
    : params_(std::move(params)),
      shard_count_(transport.shard_count()),
      shard_rank_(transport.shard_rank()),
      reads_flags_(transport.reads_flags()),
      layout_(extents_of(params_), shard_count_, alignment_of(codec, dtype)),
      dtype_(dtype),
      arrived_(params_.size(), false) {
  rows_ = transport.row_memory(row_bytes(), device);
  if (codec != nullptr) rows_.zero_();  // codes have scales of gaps between chunks, too
  chunks_ = flag_bytes() == 0 ? rows_ : rows_.narrow(1, flag_bytes(), layout_.row_bytes());
  memory_.ready(DeviceStream::current(device));
}

int64_t ReduceScatterInput::flag_bytes() const { return align_up(flag_count() * bytes_of(dtype_)); }

int64_t ReduceScatterInput::first_element() const { return flag_bytes() / bytes_of(dtype_); }

std::optional<RowCodes> ReduceScatterInput::codes(
    const std::shared_ptr<const GatherCodec>& codec) const {
  if (!codec || !at::isFloatingType(dtype_)) return std::nullopt;
  auto elements = layout_.lengths();
  if (elements.empty()) elements.assign(static_cast<size_t>(shard_count_), layout_.row_bytes());
  for (auto& each : elements) each /= bytes_of(dtype_);
  return RowCodes(codec, dtype_, flag_bytes(), std::move(elements));
}

int64_t ReduceScatterInput::elements_of_a_row() const {
  return layout_.row_bytes() / bytes_of(dtype_);
}

std::vector<int64_t> ReduceScatterInput::lengths() const {
  auto lengths = layout_.lengths();
  for (auto& length : lengths) length += flag_bytes();
  return lengths;
}

ReduceScatterInput::~ReduceScatterInput() {
  if (rows_.defined()) memory_.free();
}

int64_t ReduceScatterInput::position(int64_t index) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].index == index) return static_cast<int64_t>(i);
  }
  return -1;
}

void ReduceScatterInput::add(int64_t position, const at::Tensor& gradient) {
  memory_.use(DeviceStream::current(rows_.device()));
  const auto& chunk = layout_.chunk(position);
  const RowsToReduce rows{chunks_, dtype_};
  if (arrived_[static_cast<size_t>(position)]) return add_to_rows(gradient, rows, chunk);
  copy_to_rows(gradient, rows, chunk);
  arrived_[static_cast<size_t>(position)] = true;
  ++arrived_count_;
}

void ReduceScatterInput::write_flags(Late late) {
  if (!reads_flags_) return;
  const auto bytes = flag_count() * bytes_of(dtype_);
  auto raised = arrived_;
  raised.push_back(late == Late::kSome);
  auto* const first = static_cast<char*>(rows_.data_ptr());
  AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2(at::kHalf, at::kBFloat16, dtype_, "gradient flags",
                                              [&] { write_raised<scalar_t>(raised, first); });
  for (int64_t row = 1; row < shard_count_; ++row)
    std::memcpy(first + row * rows_.stride(0), first, static_cast<size_t>(bytes));
}

at::Tensor ReduceScatterInput::release_rows(Late late) {
  memory_.free();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (arrived_[i]) continue;
    const auto& chunk = layout_.chunk(static_cast<int64_t>(i));
    if (chunk.is_even()) {
      chunks_.narrow(1, chunk.offset, chunk.capacity_bytes()).zero_();
      continue;
    }
    for (int64_t rank = 0; rank < shard_count_; ++rank)
      chunks_[rank].narrow(0, chunk.offset_on(rank), chunk.room(rank)).zero_();
  }
  chunks_.reset();
  write_flags(late);
  return std::move(rows_);
}

at::Tensor ReduceScatterInput::part(const at::Tensor& row, int64_t position) const {
  return view_of(row, params_[static_cast<size_t>(position)].shard_shape,
                 row.storage_offset() + first_element() +
                     layout_.chunk(position).offset_on(shard_rank_) / bytes_of(dtype_));
}

at::Tensor ReduceScatterInput::elements(const at::Tensor& row) const {
  return row.narrow(0, first_element(), row.numel() - first_element());
}

void ReduceScatterInput::add_part(at::Tensor& row, int64_t position, const at::Tensor& part) {
  this->part(row, position).add_(part);
  arrived_[static_cast<size_t>(position)] = true;
  if (reads_flags_) row.narrow(0, position, 1).add_(1);
}

std::vector<bool> ReduceScatterInput::read_flags(const at::Tensor& row) const {
  std::vector<bool> raised;
  AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2(
      at::kHalf, at::kBFloat16, row.scalar_type(), "gradient flags",
      [&] { raised = read_raised<scalar_t>(row.const_data_ptr<scalar_t>(), flag_count()); });
  return raised;
}

std::vector<bool> ReduceScatterInput::used(const at::Tensor& row) const {
  if (!used_.empty()) return used_;
  if (!reads_flags_) return std::vector<bool>(params_.size(), true);
  auto used = read_flags(row);
  used.pop_back();  // of late gradients
  return used;
}

bool ReduceScatterInput::late(const at::Tensor& row) const {
  return reads_flags_ && read_flags(row).back();
}

ReduceSettings::ReduceSettings(const GroupInfo& info, const std::vector<FSDPParam>& params)
    : info_(info),
      has_replicated_members_(std::any_of(params.begin(), params.end(), is_replicated)),
      batches_beside_(batches_of(params, info.rank())),
      feedback_(std::make_shared<ErrorFeedback>(info.accounts())) {}

at::ScalarType ReduceSettings::dtype_of(const FSDPParam& param) const {
  const auto own = param.meta().dtype();
  return at::isFloatingType(own) ? dtype_.value_or(own) : own;
}

void ReduceSettings::run_hook(const ReduceScatterInput& input, const at::Tensor& row) const {
  if (hook_) hook_(input.elements(row));
}

double ReduceSettings::divisor() const {
  const auto copies = info_.replicas() == nullptr ? 1 : info_.replicas()->shard_count();
  const auto ranks = info_.comm_context().shard_count() * copies * batches_beside_;
  return info_.unit().policy.gradient_divide_factor.value_or(static_cast<double>(ranks));
}

bool ReduceSettings::reduces_over_replicas() const {
  return info_.replicas() != nullptr && info_.unit().policy.all_reduce_gradients;
}

bool ReduceSettings::stays_here() const {
  return info_.is_alone() && !hook_ && !has_replicated_members_;
}

bool ReduceSettings::publishes_unused() const {
  return hook_ || info_.unit().policy.reduce_unused_params;
}

uint64_t ReduceSettings::next_seed() {
  const auto of_rank = static_cast<uint64_t>(info_.rank()) << 32 | info_.number();
  const auto mixed = XXH3_64bits_withSeed(&of_rank, sizeof of_rank, reductions_++);
  return mixed >> 1;  // as seed_of_row() wants it (transport/row_codes.cc)
}

GradientReduction::GradientReduction(c10::intrusive_ptr<FSDPParamGroup> group,
                                     ReduceScatterInput input)
    : group_(std::move(group)), input_(std::move(input)) {}

GradientReduction::GradientReduction(GradientReduction&&) noexcept = default;

ReduceStream& GradientReduction::reduce_stream() const {
  return group_->info().comm_context().reduce_stream(group_->shards().member_device());
}

GradientReduction::~GradientReduction() {
  if (!group_) return;  // was moved
  const CurrentStream on_reduce_stream(reduce_stream().stream());
  take_in_flight();
}

std::optional<InFlight<SummedRow>> GradientReduction::take_in_flight() {
  auto* const sent = std::get_if<Sent>(&stage_);
  if (sent == nullptr || !sent->sum) return std::nullopt;
  group_->info().accounts().add(&Counters::staging_bytes, -sent->sum->staging_bytes());
  return std::exchange(sent->sum, std::nullopt);
}

void GradientReduction::put_in_flight(Sent::Over over, InFlight<SummedRow> sum) {
  group_->info().accounts().add(&Counters::staging_bytes, sum.staging_bytes());
  stage_.emplace<Sent>(Sent{over, std::move(sum)});
}

at::Tensor GradientReduction::wait_for_sum() {
  const auto& info = group_->info();
  const WaitClock clock(info.accounts());
  auto sum = take_in_flight()->wait();
  words_ = std::move(sum.words);
  const bool is_over_shards = std::get<Sent>(stage_).over == Sent::Over::kShards;
  const auto& transport = is_over_shards ? info.comm_context().transport() : *info.replicas();
  failure_.check(words_, transport.reductions(),
                 "gradients of unit '" + info.name() + "' were not reduced");
  return std::move(sum.row);
}

void GradientReduction::send(ReduceScatterInput::Late late) {
  const CurrentStream on_reduce_stream(reduce_stream().stream());
  const auto ranks = group_->info().comm_context().shard_count();
  const auto codes = input_.codes(group_->info().unit().gradient_codecs.shards);
  const auto bytes = (codes ? codes->row_bytes() : input_.row_bytes()) * (ranks - 1);
  const ProfilerRange range("reduce_scatter", group_->info().name(), bytes);
  auto issue = group_->info().issue({}, &group_->info().unit().custom.reduce_scatter);
  auto& transport = group_->info().comm_context().transport();
  put_in_flight(Sent::Over::kShards, reduce(transport, input_, late, codes, {}, std::move(issue)));
  group_->info().accounts().count(&Counters::reduce_scatters);
  group_->info().accounts().add(&Counters::reduce_scatter_bytes, bytes);
}

// Of `input`, whose rows go to `transport`.
InFlight<SummedRow> GradientReduction::reduce(Transport& transport, ReduceScatterInput& input,
                                              ReduceScatterInput::Late late,
                                              const std::optional<RowCodes>& codes,
                                              const at::Tensor& residual, Issue issue) {
  const auto rows = input.release_rows(late);
  if (!codes) {
    issue.lengths = input.lengths();
    return transport.reduce(rows, Summands(input.dtype()), issue);
  }
  const auto sent = transport.row_memory(codes->row_bytes(), rows.device());
  const auto seed = group_->gradients().settings().next_seed();
  failure_.keep(transport.brings_words(), [&] { codes->encode(rows, sent, seed, residual); });
  issue.words = failure_.words(issue.words);
  issue.lengths = codes->lengths();
  return transport.reduce(sent, codes->summands(transport.shard_rank(), failure_), issue);
}

void GradientReduction::receive() {
  const RuntimeMode runtime_mode;
  const CurrentStream on_reduce_stream(reduce_stream().stream());
  auto row = wait_for_sum();
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

// Undefined without error feedback.
at::Tensor GradientReduction::take_remainder(c10::IntArrayRef shape, const at::Tensor& like) {
  if (!group_->info().unit().gradient_codecs.error_feedback) return {};
  const auto& feedback = group_->gradients().settings().feedback();
  std::vector<int64_t> params;
  for (const auto& param : input_.params()) params.push_back(param.index);
  remainder_ =
      std::make_unique<Remainder>(feedback, input_.dtype(), std::move(params), shape, like);
  return remainder_->values();
}

void GradientReduction::send_to_replicas(at::Tensor row) {
  const auto& info = group_->info();
  const auto ranks = info.replicas()->shard_count();
  CodedAllReduce coded{
      .codec = info.unit().gradient_codecs.replicas, .row = row, .flags = input_.first_element()};
  const bool is_coded = coded.codec && at::isFloatingType(row.scalar_type());
  const auto bytes = is_coded ? (ranks - 1) * coded.bytes_of_piece(ranks)
                              : bytes_of_all_reduce(row, *info.replicas());
  const ProfilerRange range("all_reduce", info.name(), bytes);
  info.accounts().count(&Counters::all_reduces);
  info.accounts().add(&Counters::all_reduce_bytes, bytes);
  const auto issue = info.issue(group_->agreement().word_for_replicas());
  if (!is_coded)
    return put_in_flight(Sent::Over::kReplicas, info.replicas()->all_reduce(std::move(row), issue));
  coded.seed = group_->gradients().settings().next_seed();
  coded.residual = take_remainder({ranks, coded.elements_of_piece(ranks)}, row);
  put_in_flight(Sent::Over::kReplicas, info.replicas()->all_reduce(coded, issue));
}

// Each outer rank gets the sum of its pieces of `row`, of the parameters that were used.
void GradientReduction::send_pieces(const at::Tensor& row) {
  const auto& info = group_->info();
  auto& outer = *info.replicas();
  const auto& codec = info.unit().gradient_codecs.replicas;
  pieces_.emplace(pieces_of(row), row.scalar_type(), outer, row.device(), codec.get());
  const auto codes = pieces_->codes(codec);
  const auto bytes =
      (codes ? codes->row_bytes() : pieces_->row_bytes()) * (outer.shard_count() - 1);
  at::Tensor residual;
  if (codes) residual = take_remainder({outer.shard_count(), pieces_->elements_of_a_row()}, row);
  const ProfilerRange range("outer_reduce_scatter", info.name(), bytes);
  const auto used = input_.used(row);
  for (size_t i = 0; i < used.size(); ++i) {
    const auto position = static_cast<int64_t>(i);
    if (used[i]) pieces_->add(position, input_.part(row, position));
  }
  const auto late =
      input_.late(row) ? ReduceScatterInput::Late::kSome : ReduceScatterInput::Late::kNone;
  put_in_flight(Sent::Over::kReplicas,
                reduce(outer, *pieces_, late, codes, residual, info.issue({})));
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
  const auto* const sent = std::get_if<Sent>(&stage_);
  if (sent == nullptr || sent->over != Sent::Over::kReplicas) return;
  const RuntimeMode runtime_mode;
  const CurrentStream on_reduce_stream(reduce_stream().stream());
  receive_whole(wait_for_sum());
  if (pieces_) words_.clear();  // of a reduce-scatter they say nothing
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
                                   std::move(pieces_ ? *pieces_ : input_), std::move(row),
                                   std::move(remainder_));
}

ReducedRow::ReducedRow(std::shared_ptr<Unit> unit, ReduceScatterInput input, at::Tensor row,
                       std::unique_ptr<Remainder> remainder)
    : unit_(std::move(unit)),
      input_(std::move(input)),
      row_(std::move(row)),
      remainder_(std::move(remainder)) {}

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
  const auto& params = input_.params();
  const auto used = group->gradients().settings().publishes_unused()
                        ? std::vector<bool>(params.size(), true)
                        : input_.used(row);
  for (size_t i = 0; i < params.size(); ++i) {
    if (!used[i]) continue;
    auto& param = group->params()[static_cast<size_t>(params[i].index)];
    accumulate_sharded_grad(param, input_.part(row, static_cast<int64_t>(i)), group->info().rank());
  }
  if (remainder_) remainder_->published();
  remainder_.reset();
  group->unsharded().shards_change();
}

}  // namespace fsdp::internal
