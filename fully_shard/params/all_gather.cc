#include "fully_shard/params/all_gather.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/internal/profiler_range.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "fully_shard/transport/streams.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

// This rank's part of parameter `index` in the row: uint8 [bytes]. A view.
at::Tensor place_in_row(const RowMemory& row, const ShardGrid& grid, int64_t index) {
  const auto& chunk = row.layout().chunk(index);
  return row.bytes().narrow(0, chunk.offset_on(grid.place()), chunk.length(grid.place()));
}

// `values`: [n], of some rows; `codes`: uint8 [bytes], of as many. Calls what(codec,
// values, codes), both in rows.
template <class What>
void run_by_rows(const FSDPParam& param, const at::Tensor& values, const at::Tensor& codes,
                 const char* failed, const What& what) {
  if (values.numel() == 0) return;
  const auto& codec = *param.meta().codec();
  const std::vector<int64_t> rows = {codes.numel() / param.meta().gathered_extent().row_bytes, -1};
  run_codec(codec, " of parameter '" + param.name() + failed,
            [&] { what(codec, values.view(rows), codes.view(rows)); });
}

void encode(const FSDPParam& param, const at::Tensor& values, const at::Tensor& codes) {
  run_by_rows(param, values, codes, "' failed to encode",
              [](const auto& codec, const auto& from, const auto& to) { codec.encode(from, to); });
}

void decode(const FSDPParam& param, const at::Tensor& codes, const at::Tensor& values) {
  run_by_rows(param, values, codes, "' failed to decode",
              [](const auto& codec, const auto& to, const auto& from) { codec.decode(from, to); });
}

// All of a row in one launch: to another dtype; or from host memory, in which it is one
// piece; or both, in one launch each. What is encoded takes launches of its own.
void copy(const RowMemory& row, const ShardBuffer& shards, const std::vector<FSDPParam>& params) {
  const bool is_staged = any(params, &ParamMeta::is_staged);
  auto source = shards.bytes();
  if (shards.is_offloaded()) {
    source = is_staged ? at::empty_like(source, row.bytes().options()) : row.bytes();
    shards.copy_to(source);
  }
  if (!is_staged) return;
  std::vector<at::Tensor> from, to;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const auto elements = shards.elements_in(source, index, params[i]);
    const auto place = place_in_row(row, shards.grid(), index);
    if (params[i].meta().is_encoded_to_be_sent()) {
      encode(params[i], elements, place);
    } else {
      from.push_back(elements);
      to.push_back(place.view(params[i].meta().gathered_dtype()));
    }
  }
  if (!to.empty()) at::_foreach_copy_(to, from);
}

}  // namespace

RowMemory::RowMemory(Transport& transport, PackedLayout layout, int64_t Counters::*counter,
                     GroupAccounts accounts)
    : transport_(transport),
      layout_(std::move(layout)),
      counter_(counter),
      accounts_(std::move(accounts)) {}

void RowMemory::allocate(at::Tensor bytes) {
  free();
  bytes_ = std::move(bytes);
  accounts_.add(counter_, bytes_.numel());
}

void RowMemory::refill() {
  streams_.use_after_others(DeviceStream::current(bytes_.device()), StreamWait::kFreeAfterUse);
  streams_.free();
}

PackedRow RowMemory::row() {
  streams_.use(DeviceStream::current(bytes_.device()));
  return {transport_, layout_, bytes_};
}

void RowMemory::free() {
  if (!exists()) return;
  accounts_.add(counter_, -bytes_.numel());
  streams_.free();
  bytes_.reset();
}

bool are_staged(const std::vector<FSDPParam>& params, const ShardBuffer& shards) {
  return shards.is_offloaded() || any(params, &ParamMeta::is_staged);
}

std::unique_ptr<RowMemory> make_staging(const std::vector<FSDPParam>& params,
                                        const ShardBuffer& shards, Transport& transport,
                                        GroupAccounts accounts) {
  if (!are_staged(params, shards)) return nullptr;
  const auto& grid = shards.grid();
  return std::make_unique<RowMemory>(
      transport, PackedLayout(cut_over(gathered_extents_of(params), grid), grid.count()),
      &Counters::staging_bytes, std::move(accounts));
}

at::Tensor encoded(const FSDPParam& param, const at::Tensor& values) {
  const auto extent = param.meta().gathered_extent();
  const auto value_rows =
      values.numel() / std::max<int64_t>(param.meta().extent(at::kByte).row_bytes, 1);
  auto codes = at::empty({value_rows * extent.row_bytes}, values.options().dtype(at::kByte));
  encode(param, values, codes);
  return codes;
}

PackedRow stage(RowMemory& staging, const ShardBuffer& shards, const std::vector<FSDPParam>& params,
                CodecFailure& failure) {
  auto& transport = staging.transport();
  staging.allocate(transport.staging_memory(staging.layout().row_bytes(), shards.member_device()));
  try {
    failure.keep(transport.brings_words(), [&] { copy(staging, shards, params); });
  } catch (...) {
    staging.free();
    throw;
  }
  return {transport, staging.layout(), staging.bytes()};  // no other stream uses it
}

void decode(const RoomOfParameters& codes, const RoomOfParameters& values,
            const std::vector<FSDPParam>& params) {
  for (size_t i = 0; i < params.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const auto from =
        codes.bytes.narrow(0, codes.offset(index), codes.layout.chunk(index).extent.nbytes());
    const auto to =
        values.bytes.narrow(0, values.offset(index), values.layout.chunk(index).extent.nbytes());
    if (params[i].meta().codec() == nullptr) {
      to.copy_(from);
    } else {
      decode(params[i], from, to.view(params[i].meta().member_dtype()));
    }
  }
}

void AllGather::start(const PackedRow& own, const Issue& issue) {
  const auto issuer = DeviceStream::current(own.bytes.device());
  gather_.emplace(own.transport.gather(own.bytes, issue));
  layout_ = &own.layout;
  ranks_ = own.transport.shard_count();
  accounts_.add(&Counters::staging_bytes, gather_->staging_bytes());
  issuer_ = issuer;
}

void AllGather::start_read(std::unique_ptr<SharedRead> read, const PackedLayout& layout,
                           int64_t ranks) {
  read_ = std::move(read);
  layout_ = &layout;
  ranks_ = ranks;
  issuer_ = DeviceStream::current(c10::kCPU);
}

GatheredRows AllGather::wait() {
  try {
    const WaitClock clock(accounts_);
    return read_ != nullptr ? read_->wait() : gather_->wait();
  } catch (...) {
    drop();
    throw;
  }
}

void AllGather::rows_were_read(const DeviceEvent& read) {
  if (*issuer_ != DeviceStream::current(issuer_->device()))
    make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, read);
}

// Destroying a gather that was not waited for makes the current stream wait for it, which
// is its issuer's here.
void AllGather::release() {
  const CurrentStream on_issuer(*issuer_);
  const auto staging_bytes = gather_ ? gather_->staging_bytes() : 0;
  gather_.reset();
  read_.reset();
  accounts_.add(&Counters::staging_bytes, -staging_bytes);
}

void AllGather::wait_and_tell_issuer() {
  gather_->wait();
  make_wait(StreamWait::kRowsFreeAfterCopyOut, *issuer_, DeviceStream::current(issuer_->device()));
}

// What may throw below is a broken invariant, which ends the process here.
// NOLINTNEXTLINE(bugprone-exception-escape)
void AllGather::drop() noexcept {
  if (!exists()) return;
  try {
    if (gather_ && *issuer_ != DeviceStream::current(issuer_->device())) wait_and_tell_issuer();
  } catch (const std::exception&) {
    // What it brought no longer matters.
  }
  release();
}

void AllGather::await_and_drop() {
  if (read_ != nullptr) return drop();  // it has read nothing yet
  try {
    const WaitClock clock(accounts_);
    wait_and_tell_issuer();
  } catch (...) {
    drop();
    throw;
  }
  release();
}

InnerShards::InnerShards(const GroupInfo& info, const std::vector<FSDPParam>& params,
                         const ShardBuffer& shards)
    : info_(info),
      params_(params),
      shards_(shards),
      row_(info.comm_context().transport(),
           PackedLayout(gathered_extents_of(params), shards.grid().inner_ranks),
           &Counters::inner_shard_bytes, info.accounts()),
      staging_(make_staging(params, shards, *info.replicas(), info.accounts())),
      gather_(info.accounts()) {
  const auto device = shards.member_device();
  if (device.is_meta()) return;
  row_.allocate(row_.transport().shard_memory(layout().row_bytes(), device));
  row_.filled();
}

const PackedLayout& InnerShards::layout_of_pieces() const {
  return staging_ ? staging_->layout() : shards_.layout();
}

bool InnerShards::are_to_be_issued() const {
  return is_stale_ && !gather_.exists() && shards_.has_values();
}

void InnerShards::pieces_change() {
  is_stale_ = true;
  gather_.drop();
  if (staging_) staging_->free();
}

PackedRow InnerShards::pieces() {
  if (staging_) return stage(*staging_, shards_, params_, failure_);
  auto& outer = *info_.replicas();
  return {outer, shards_.layout(), shards_.row(outer)};
}

void InnerShards::issue(NoticeWords words, Layouts layouts) {
  TORCH_INTERNAL_ASSERT(are_to_be_issued());
  const auto own = pieces();
  auto issue = info_.issue(failure_.words(words));
  if (layouts == Layouts::kAgreed) issue.lengths = lengths_of_column();
  const auto bytes = (own.transport.shard_count() - 1) * own.layout.row_bytes();
  const ProfilerRange range("outer_all_gather", info_.name(), bytes);
  gather_.start(own, issue);
  info_.accounts().count(&Counters::outer_all_gathers);
  info_.accounts().add(&Counters::outer_all_gather_bytes, bytes);
}

// Of the rows of this rank's column: its inner shards' pieces.
std::vector<int64_t> InnerShards::lengths_of_column() const {
  const auto& all = layout_of_pieces().lengths();
  std::vector<int64_t> lengths;
  if (all.empty()) return lengths;
  const auto& grid = shards_.grid();
  for (int64_t outer = 0; outer < grid.outer_ranks; ++outer)
    lengths.push_back(all[static_cast<size_t>(grid.place_of(grid.inner_rank, outer))]);
  return lengths;
}

std::vector<NoticeWords> InnerShards::wait() {
  if (!gather_.exists()) return {};
  auto rows = gather_.wait();
  try {
    failure_.check(rows.words(), info_.replicas()->gathers(),
                   "unit '" + info_.name() + "' was not gathered");
  } catch (...) {
    rows = {};
    gather_.release();
    staging_->free();
    throw;
  }
  row_.refill();
  unpack(rows);
  row_.filled();
  gather_.rows_were_read(row_.when_filled());
  auto words = rows.words();
  rows = {};
  gather_.release();
  if (staging_) staging_->free();
  return words;
}

void InnerShards::unpack(const GatheredRows& rows) {
  const auto& grid = shards_.grid();
  const auto& pieces = layout_of_pieces();
  auto* const shards = static_cast<char*>(row_.bytes().mutable_data_ptr());
  for (int64_t outer = 0; outer < grid.outer_ranks; ++outer) {
    const auto place = grid.place_of(grid.inner_rank, outer);
    for (int64_t index = 0; index < layout().size(); ++index) {
      const auto& piece = pieces.chunk(index);
      const auto& shard = layout().chunk(index);
      unpack_part(shards + shard.offset_on(grid.inner_rank),
                  rows.row(outer) + piece.offset_on(place),
                  place_within({piece, place}, {shard, grid.inner_rank}), row_.bytes().device());
    }
  }
}

}  // namespace fsdp::internal
