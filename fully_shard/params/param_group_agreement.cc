// How the ranks of a group find that they differ in what all must have alike.
#include "fully_shard/params/param_group.h"
#include "fully_shard/transport/mesh_dims.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace fsdp::internal {
namespace {

bool all_are(uint64_t word, const std::vector<uint64_t>& words) {
  return std::all_of(words.begin(), words.end(), [word](uint64_t other) { return other == word; });
}

std::vector<uint64_t> agreements_in(const std::vector<NoticeWords>& words) {
  std::vector<uint64_t> agreements;
  for (const auto& each : words) agreements.push_back(each.agreement);
  return agreements;
}

std::vector<int64_t> ranks_that_shard(const DeviceMesh& mesh) {
  const auto count = mesh.size(shard_dim_of(mesh));
  const auto first = mesh.ndim() == 2 ? mesh.coordinate()[0] * count : 0;
  return {mesh.ranks().begin() + first, mesh.ranks().begin() + first + count};
}

// "ranks 0, 4": those that have this rank's shards, and said `word`.
std::string ranks_with(uint64_t word, const std::vector<uint64_t>& words, const DeviceMesh& mesh) {
  std::vector<int64_t> ranks;
  for (size_t replica = 0; replica < words.size(); ++replica) {
    const auto place = static_cast<int64_t>(replica) * mesh.size(1) + mesh.coordinate()[1];
    if (words[replica] == word) ranks.push_back(mesh.ranks()[static_cast<size_t>(place)]);
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + c10::Join(", ", ranks);
}

}  // namespace

// A rank that took no part in a run of writes has another model than the others.
void ParamGroup::check_writes(const std::vector<NoticeWords>& of_shards) {
  std::vector<Holders> all;
  for (const auto& each : of_shards) all.push_back(static_cast<Holders>(each.writing));
  if (WriteRuns::all_took_part(all)) {
    if (write_runs_.compared(all)) replica_writes_.run_ended();
    return;
  }
  empty_copy();
  TORCH_CHECK_VALUE(
      false, "not all ranks wrote the shards of unit '", name(), "' (the first parameter is '",
      params_.front().name(), "') since it was gathered last: they have been written ",
      write_runs_.describe(all, ranks_that_shard(mesh_)),
      ". A rank that skips optimizer.step(), or writes a parameter alone, goes on with another "
      "model than the others: decide together, with an all-reduce of the flag. Once every rank "
      "has written or loaded these shards, training goes on; every rank gets this error (rank ",
      dim_->global_rank(), ")");
}

void ParamGroup::check_replica_writes(const std::vector<NoticeWords>& of_replicas) {
  std::vector<uint64_t> words;
  for (const auto& each : of_replicas) words.push_back(each.writing);
  if (ReplicaWrites::agree(words)) return replica_writes_.compared(words);
  TORCH_CHECK_VALUE(
      false, "not all replicas wrote the shards of unit '", name(), "' (the first parameter is '",
      params_.front().name(), "') since their gradients were added up last: written on ",
      ranks_with(ReplicaWrites::kWrote, words, mesh_), ", not on ",
      ranks_with(ReplicaWrites::kDidNot, words, mesh_),
      ". A rank that skips optimizer.step(), or writes a parameter alone, goes on with another "
      "model than the others: decide together, with an all-reduce of the flag. The gradients of "
      "this backward were dropped, and those of earlier ones that were not in .grad yet, as after "
      "set_is_last_backward(false). Once every rank has written or loaded these shards, training "
      "goes on; every rank gets this error (rank ",
      dim_->global_rank(), ")");
}

// All ranks learn of a difference, whether it is among those that shard or between
// replicas. Where there is nothing to agree on, no rank asks the replicas; nor of copies
// alone, which not all ranks need have noted.
void ParamGroup::check_agreement(const std::vector<NoticeWords>& of_shards) {
  const bool asks = replicas_ && agreed_.is_of_all_ranks() && replicas_->checks_stamps();
  std::string here;
  if (!all_are(agreed_.word(), agreements_in(of_shards)))
    here = difference_along(shard_dim_of(mesh_));
  const uint64_t word = here.empty() ? agreed_.word() : AgreedValues::kDiffer;
  const auto of_replicas = asks ? words_of_replicas(word) : std::vector<uint64_t>();
  if (!here.empty()) report_difference(here);
  const auto differ = std::find(of_replicas.begin(), of_replicas.end(), AgreedValues::kDiffer);
  if (differ != of_replicas.end()) report_difference_in(differ - of_replicas.begin());
  if (all_are(word, of_replicas)) return;
  const std::string between = difference_along(*replicate_dim_of(mesh_));
  if (!between.empty()) report_difference(between);
}

std::vector<uint64_t> ParamGroup::words_of_replicas(uint64_t word) const {
  const auto nothing = at::empty({0}, at::TensorOptions().dtype(at::kByte));
  return agreements_in(replicas_->gather(nothing, issue({.agreement = word}))->wait().words());
}

void ParamGroup::report_difference_in(int64_t replica) {
  empty_copy();
  TORCH_CHECK_VALUE(false, "parameters of unit '", name(), "' (the first is '",
                    params_.front().name(), "') differ among the ranks of replica ", replica,
                    ", which name the parameter and what happened; every rank gets an error (rank ",
                    dim_->global_rank(), ")");
}

std::string ParamGroup::difference_along(int64_t mesh_dim) {
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param.name());
  return agreed_.difference(mesh_, mesh_dim, names);
}

void ParamGroup::report_difference(const std::string& what) {
  empty_copy();
  TORCH_CHECK_VALUE(false, what, "; every rank gets this error (rank ", dim_->global_rank(), ")");
}

}  // namespace fsdp::internal
