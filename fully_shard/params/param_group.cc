#include "fully_shard/params/param_group.h"

#include "fully_shard/params/gradient_share.h"
#include "fully_shard/params/runtime_mode.h"
#include "fully_shard/units/root.h"

#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal {
ParamGroup::ParamGroup(const DeviceMesh& mesh, std::shared_ptr<ShardDim> dim,
                       std::shared_ptr<Transport> replicas, std::shared_ptr<Unit> unit,
                       std::shared_ptr<GroupDriver> driver, std::vector<ShardedParam> params)
    : mesh_(mesh),
      dim_(std::move(dim)),
      replicas_(std::move(replicas)),
      unit_(std::move(unit)),
      driver_(std::move(driver)),
      home_(home_of_shards(unit_->offload, mesh.device_type())),
      number_(dim_->next_unit_number()),
      params_(std::move(params)),
      accounts_(dim_, unit_),
      copy_(is_alone() && !are_staged() ? Residence::kBorrowed : Residence::kSharded,
            dim_->shard_count(), accounts_),
      agreed_(params_.size()),
      gradients_(*this, params_, accounts_) {
  unit_->group = this;
  unit_->root->groups[unit_->id] = this;
}

ParamGroup::~ParamGroup() {
  unit_->group = nullptr;
  unit_->root->groups.erase(unit_->id);
  unit_->root->schedule.emptied(unit_->id);
  driver_->destroyed(*this);
}

void ParamGroup::open_shards(c10::Device device) {
  shards_ = std::make_unique<ShardBuffer>(params_, *dim_, device, home_, accounts_);
  holders_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& chunk = shards_->layout().chunk(static_cast<int64_t>(i));
    holders_.push_back(holders_of(chunk, dim_->shard_count()));
  }
  open_staged_row();
}

void ParamGroup::open_staged_row() {
  staged_row_ =
      are_staged() ? std::make_unique<StagedRow>(params_, dim_->transport(), accounts_) : nullptr;
}

bool ParamGroup::casts() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const auto& each) { return each.is_cast(); });
}

c10::Device ParamGroup::device() const {
  return is_offloaded() && has_values() ? unit_->device : shards_->device();
}

const PackedLayout& ParamGroup::member_layout() const {
  return staged_row_ ? staged_row_->layout() : shards_->layout();
}

void ParamGroup::release_resources() {
  for (auto& param : params_) param.release_tripwire();
}

const std::string& ParamGroup::name() const {
  static const std::string root = kRootName;
  return unit_->name.empty() ? root : unit_->name;
}

void ParamGroup::rename(const std::function<std::string(const std::string& name)>& renamed) {
  for (auto& param : params_) {
    param.rename(renamed(param.name()));
    if (param.storage() != nullptr) param.storage()->renamed();
  }
}

void ParamGroup::touch() {
  check_has_values();
  if (!residency().is_borrowed()) return driver_->touched(*this);
  // As graph_recorded(): a backward would add to them, and tensor-parallel ranks send for
  // it.
  if (gradients_.has_left_tripwires() && records_gradients(current_pass()))
    gradients_.remove_tripwires();
}

void ParamGroup::synchronize_metadata(int64_t index, c10::TensorImpl* impl) {
  if (is_member(index, impl)) param(index).synchronize_requires_grad();
}

bool ParamGroup::is_member(int64_t index, const c10::TensorImpl* impl) const {
  return params_[static_cast<size_t>(index)].is_member(impl);
}

const std::string& ParamGroup::parameter_name(int64_t index) const {
  return params_[static_cast<size_t>(index)].name();
}

at::Tensor ParamGroup::gradient_share(int64_t, const at::Tensor& gradient) const {
  return internal::gradient_share(gradient, mesh_);
}

void ParamGroup::storage_destroyed(int64_t index, const OnDemandStorage* storage) noexcept {
  param(index).storage_destroyed(storage);
}

Issue ParamGroup::issue(NoticeWords words, const Communicate* custom) const {
  return {.unit = number_,
          .unit_name = name(),
          .words = words,
          .custom = custom && *custom ? custom : nullptr};
}

void ParamGroup::prefetch() {
  issue_gather();
  if (residency().is_gathering()) unit_->root->schedule.unsharded(unit_->id);
}

void ParamGroup::issue_gather() {
  if (!residency().is_sharded()) return;
  check_has_values();
  if (evict_after_every_operator() && !pinned()) return;  // a prefetch: that mode is about touches
  RECORD_FUNCTION("fsdp::all_gather(" + name() + ")", {});
  const RuntimeMode runtime_mode;
  await_optimizer();
  const auto row = row_to_gather();
  const bool among_neighbours = &row.transport != &dim_->transport();
  copy_.issue(row, issue({.agreement = agreed_.word(), .writing = write_runs_.writing()},
                         among_neighbours ? nullptr : &unit_->custom.all_gather));
  gather_count_.gathered();
  accounts_.count(&Counters::all_gathers);
  if (!pinned()) accounts_.count(&Counters::prefetched_all_gathers);
}

void ParamGroup::await_optimizer() {
  const auto event = std::exchange(unit_->root->after_optimizer, nullptr);
  if (event) event->block(c10::impl::VirtualGuardImpl(device().type()).getStream(device()));
}

PackedRow ParamGroup::row_to_gather() {
  if (post_forward_ && post_forward_->is_kept()) return post_forward_->row();
  if (staged_row_) return staged_row_->stage(*shards_, params_, device());
  return {dim_->transport(), shards_->layout(), shards_->bytes()};
}

void ParamGroup::fill() {
  if (!residency().is_gathering()) return;
  RECORD_FUNCTION("fsdp::all_gather_copy_out(" + name() + ")", {});
  const bool among_all = !post_forward_ || !post_forward_->is_kept();
  const auto words = gathered_words();
  writes_.copy_filled();
  drop_post_forward_shards();
  check_agreement(words);
  agreed_.agreed();
  if (among_all) check_writes(words);
}

std::vector<NoticeWords> ParamGroup::gathered_words() {
  try {
    auto words = copy_.fill(member_layout(), params_, device());
    drop_staged_row();
    return words;
  } catch (...) {
    drop_staged_row();
    unit_->root->schedule.emptied(unit_->id);
    throw;
  }
}

void ParamGroup::drop_staged_row() {
  if (staged_row_) staged_row_->drop();
}

void ParamGroup::drop_gather() noexcept {
  if (!residency().is_gathering()) return;
  copy_.drop_gather();
  drop_staged_row();
  accounts_.count(&Counters::unused_prefetches);
  unit_->root->schedule.emptied(unit_->id);
}

bool ParamGroup::may_be_emptied() const {
  return residency().is_resident() && !pinned() && !residency().is_held();
}

void ParamGroup::set_neighbours(std::shared_ptr<Transport> neighbours) {
  drop_gather();
  post_forward_.reset();
  if (neighbours)
    post_forward_ = std::make_unique<PostForwardShards>(params_, std::move(neighbours), accounts_);
}

void ParamGroup::drop_post_forward_shards() {
  if (post_forward_) post_forward_->drop();
}

void ParamGroup::reshard_after_forward() {
  const bool keeps =
      post_forward_ && may_be_emptied() && !writes_.is_dirty() && !writes_.is_stale();
  if (keeps) {
    const RuntimeMode runtime_mode;
    post_forward_->keep(copy_, member_layout(), device());
  }
  empty_by_schedule();
}

void ParamGroup::reshard() {
  if (residency().is_sharded()) drop_post_forward_shards();
  empty_by_schedule();
}

void ParamGroup::empty_by_schedule() {
  if (!may_be_emptied()) return;
  note_raw_writes();
  if (writes_.is_dirty()) write_back();
  empty_copy();
  accounts_.count(&Counters::reshards);
}

void ParamGroup::evict_and_poison() {
  if (!may_be_emptied()) return;
  note_raw_writes();
  if (writes_.is_dirty()) write_back();
  copy_.poison();
  empty_copy();
  accounts_.count(&Counters::reshards);
}

void ParamGroup::empty_copy() {
  copy_.empty(params_);
  writes_.copy_emptied();
  unsettle();
  unit_->root->schedule.emptied(unit_->id);
}

void ParamGroup::empty_if_stale() {
  if (residency().is_resident() && !residency().is_held() && writes_.is_stale()) empty_copy();
}

void ParamGroup::graph_recorded() {
  writes_.graph_recorded();
  replica_writes_.used();
  gradients_.remove_tripwires();
}

void ParamGroup::check_graph_is_current(Pass pass) const {
  TORCH_CHECK(pass != Pass::kBackward || writes_.graph_is_current(), "backward through unit '",
              name(), "' whose parameters (the first is '", params_.front().name(),
              "') were written after the forward that recorded this graph, so its gradients would "
              "be wrong; run the forward again after the optimizer step (rank ",
              dim_->global_rank(), "; every rank that writes and runs backward fails alike)");
}

void ParamGroup::check_shards_are_announced() {
  for (auto& param : params_) param.check_shard_is_announced(dim_->global_rank());
}

}  // namespace fsdp::internal
